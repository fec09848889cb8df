"""What KV in 8 bits costs below the pages: `python -m bench.tier_error [--model DIR|NAME] [--text FILE]`.

The first half of each window of a text is prefilled once; its KV then goes through a tier's codec (encode, check,
decode) as each type, and the second half is run on top of what came back, teacher-forced. Printed against the KV as it
was: the relative error |x' - x| / |x| of all K and of all V, perplexity, mean Kullback-Leibler divergence in nats, how
often both would pick the same next token; and what a unit takes: bytes, time to encode and to decode.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from bench.perplexity import CHUNK_TOKENS, PAGE_SIZE, WINDOW_TOKENS, Score, parse_command_line
from gpu_worker.model_runner import load_runner
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.step_batch import StepBatch
from gpu_worker.tiers.open_tiers import open_codec
from gpu_worker.tiers.unit_codec import Bytes, LowerTierDtype, UnitCodec
from gpu_worker.transfer.port import UnitPlace, unit_places
from kvstore.prefix_hash import namespace
from wire.config import WorkerConfig
from wire.ids import UNIT_TOKENS, PageId, UnitHash
from wire.model_path import cache_root, model_path

HASH = UnitHash(bytes(32))
"""Any would do: nothing is looked up."""


@dataclass(slots=True)
class Arm:
    """One type: its codec, its own pages, and what was found."""

    codec: UnitCodec
    first_page: int
    score: Score = field(default_factory=Score)
    error: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Sums of squares, of K and of V."""
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)


class Bench:
    """Arms side by side in one runner's pages; the first pages hold the KV as it was computed."""

    def __init__(self, runner: PagedModelRunner, window: int) -> None:
        assert runner.kv is not None
        self.runner = runner
        self.kv = runner.kv
        self.window_pages = -(-window // PAGE_SIZE)
        names = namespace(runner.card)
        self.arms = {
            dtype: Arm(open_codec(self.kv.format, names, dtype), (number + 1) * self.window_pages)
            for number, dtype in enumerate(LowerTierDtype)
        }
        self.size = [0.0, 0.0]
        """Sums of squares of K and V as computed."""

    def score(self, tokens: list[int]) -> None:
        """Score one window's second half."""
        prefix = len(tokens) // 2 // UNIT_TOKENS * UNIT_TOKENS
        for _ in self._logits(tokens[:prefix], 0, 0):
            pass
        for index in range(prefix // UNIT_TOKENS):
            self._pass_through(index)
        # The reference writes its second half into its own pages last: the arms have copies of the first.
        expected = self._logits(tokens, prefix, 0)
        parts = {dtype: self._logits(tokens, prefix, arm.first_page) for dtype, arm in self.arms.items()}
        position = prefix
        for reference in expected:
            targets = torch.tensor(tokens[position + 1 : position + 1 + len(reference)], dtype=torch.int64)
            position += len(reference)
            for dtype, arm in self.arms.items():
                logits = next(parts[dtype])
                arm.score.add(logits[: len(targets)], reference[: len(targets)], targets)

    def _pass_through(self, index: int) -> None:
        unit = np.concatenate([self.kv.read(layer, [self._place(0, index)]) for layer in self._layers()])
        values = self._numbers(unit)
        for half in range(2):
            self.size[half] += float(values[:, half].square().sum())
        for arm in self.arms.values():
            out = memoryview(bytearray(arm.codec.encoded_bytes))
            begun_s = time.perf_counter()
            arm.codec.encode(HASH, unit.reshape(-1), out)
            encoded_s = time.perf_counter()
            back = arm.codec.decode(HASH, out).reshape(unit.shape)
            arm.decode_s.append(time.perf_counter() - encoded_s)
            arm.encode_s.append(encoded_s - begun_s)
            difference = self._numbers(back) - values
            for half in range(2):
                arm.error[half] += float(difference[:, half].square().sum())
            for layer in self._layers():
                self.kv.write(layer, [self._place(arm.first_page, index)], back[layer : layer + 1])

    def _layers(self) -> range:
        return range(self.kv.format.num_layers)

    def _place(self, first_page: int, index: int) -> UnitPlace:
        pages = [PageId(page) for page in range(first_page, first_page + self.window_pages)]
        return unit_places(pages, index + 1, PAGE_SIZE, UNIT_TOKENS)[index]

    def _numbers(self, unit: Bytes) -> torch.Tensor:
        """float64 [num_layers, 2, elements]."""
        dtype: torch.dtype = getattr(torch, self.kv.format.dtype)
        return torch.from_numpy(unit).view(dtype).double()

    def _logits(self, tokens: list[int], start: int, first_page: int) -> Iterator[torch.Tensor]:
        """[n, vocab_size] of positions [start, len(tokens)), chunk after chunk, in pages from first_page on."""
        for begin in range(start, len(tokens), CHUNK_TOKENS):
            end = min(begin + CHUNK_TOKENS, len(tokens))
            table = list(range(first_page, first_page - (-end // PAGE_SIZE)))
            positions = list(range(begin, end))
            slots = [first_page * PAGE_SIZE + position for position in positions]
            batch = StepBatch(tokens[begin:end], positions, slots, [end - begin], [end], [table])
            batch.logit_rows = list(range(end - begin))
            yield self.runner.forward(batch)

    def table(self) -> str:
        plain = self.arms[LowerTierDtype.AUTO]
        lines = [
            "| stored as | bytes a unit | K off by | V off by | perplexity | ÷ auto | mean KL, nats "
            "| same most likely token | encode, µs | decode, µs |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for dtype, arm in self.arms.items():
            off = [(error / size) ** 0.5 for error, size in zip(arm.error, self.size, strict=True)]
            counted = arm.score
            lines.append(
                f"| {dtype} | {arm.codec.encoded_bytes} | {off[0]:.2%} | {off[1]:.2%} | {counted.perplexity:.4f} "
                f"| {counted.perplexity / plain.score.perplexity:.5f} | {counted.divergence / counted.tokens:.2e} "
                f"| {counted.same_choice / counted.tokens:.2%} "
                f"| {1e6 * sorted(arm.encode_s)[len(arm.encode_s) // 2]:.0f} "
                f"| {1e6 * sorted(arm.decode_s)[len(arm.decode_s) // 2]:.0f} |"
            )
        return "\n".join(lines)


def open_bench(config: WorkerConfig) -> Bench:
    runner = load_runner(
        model_path(config.model),
        device="cpu",
        weight_dtype=config.weight_dtype,
        activation_dtype=config.activation_dtype,
        attention_backend=config.attention_backend,
        page_size=PAGE_SIZE,
        num_pages=(1 + len(LowerTierDtype)) * -(-WINDOW_TOKENS // PAGE_SIZE),
        kv_memory_bytes=0,
        max_model_len=None,
        name="tier_error",
        kernels_dir=cache_root(config.model) if config.cpu_kernels == "auto" else None,
    )
    return Bench(runner, WINDOW_TOKENS)


def main() -> None:
    asked = parse_command_line(__doc__, least_tokens=4 * UNIT_TOKENS)
    bench, tokens = open_bench(asked.config), asked.tokens
    window = min(WINDOW_TOKENS, bench.runner.card.max_model_len)
    scored = [part for start in range(0, len(tokens), window) if len(part := tokens[start : start + window]) >= 64]
    for part in scored:
        bench.score(part)
    counted = bench.arms[LowerTierDtype.AUTO].score.tokens
    print(f"{asked.what}: {counted} tokens behind a prefix from a tier\n")
    print(bench.table())


if __name__ == "__main__":
    main()
