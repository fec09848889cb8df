"""Does every path give what an eager float32 run gives? For bench.gpu_check.

A path in 16 bits is held to the error that the plainest 16-bit path makes anyway; FP8 to what its grid allows. Two
paths' greedy tokens may differ only where that error makes the two candidates a tie.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bench.gpu_model import RunnerOptions, float8_model, make_runner, random_model
from bench.gpu_sequences import Sequences
from gpu_worker.cuda.device_sampler import SampleRow, sample_on_device
from gpu_worker.cuda.runner import CudaModelRunner
from gpu_worker.float8 import quantize_rows
from gpu_worker.float8_linear import ScaledMatmul, emulated
from gpu_worker.kv_format import Float8KV
from gpu_worker.model_config import DecoderConfig
from gpu_worker.sampler import sample
from gpu_worker.sequences import LiveSequence
from wire.ids import RequestId, SeqId, UnitHash
from wire.sampling import SamplingParams

CASES = 5
LEAST_ERROR = 1e-4
"""Relative; two float32 paths differ by less."""
FLOAT8_WEIGHTS_ERROR, FLOAT8_KV_ERROR = 0.25, 0.15
"""Relative, of a random model's logits: each layer's rounding is as independent as it gets. On the CPU about half."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    error: float
    """What is compared with `limit`; see the name for of what."""
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit  # NaN is no pass


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the checks' sequences, in tokens."""

    prompt: int
    chunk: int
    decode: int

    @property
    def capacity(self) -> int:
        return self.prompt + self.decode + 1


class Trace:
    """One path's logits: of a prompt's last token, and of every decode step after it."""

    def __init__(
        self,
        runner: CudaModelRunner,
        prompts: list[list[int]],
        sizes: Sizes,
        along: Trace | None = None,
        chunk: int | None = None,
    ) -> None:
        """along: decode that trace's tokens instead of one's own."""
        sequences = Sequences(runner, prompts, sizes.capacity)
        self.logits = [sequences.prefill(chunk)]
        for step in range(sizes.decode):
            self.logits.append(sequences.decode((along or self).logits[step]))

    def error(self, reference: Trace) -> float:
        return max(relative_error(a, b) for a, b in zip(self.logits, reference.logits, strict=True))

    def worst_flip(self, reference: Trace) -> float:
        """Where greedy tokens differ: the most by which the reference prefers its own. 0: they are equal."""
        worst = 0.0
        for ours, theirs in zip(self.logits, reference.logits, strict=True):
            lost = theirs.amax(-1) - theirs.gather(1, ours.argmax(-1, keepdim=True))[:, 0]
            worst = max(worst, float(lost.max()))
        return worst

    def largest_difference(self, reference: Trace) -> float:
        return max(float((a - b).abs().max()) for a, b in zip(self.logits, reference.logits, strict=True))


class Correctness:
    """Runs the checks one by one: `for check in Correctness(…).checks()`."""

    def __init__(
        self, config: DecoderConfig, device: torch.device, dtype: torch.dtype, matmul: ScaledMatmul | None, sizes: Sizes
    ) -> None:
        """matmul: of FP8 weights; None where the device has none. config: a shallow model's."""
        self._config, self._device, self._dtype, self._matmul, self._sizes = config, device, dtype, matmul, sizes
        rng = random.Random(0)
        self._prompts = [[rng.randrange(config.vocab_size) for _ in range(sizes.prompt)] for _ in range(CASES)]
        self._model = random_model(config, dtype, device)

    def _runner(self, **options: object) -> CudaModelRunner:
        return self._runner_of(self._model, RunnerOptions(self._dtype, **options))  # type: ignore[arg-type]

    def _runner_of(self, model: torch.nn.Module, options: RunnerOptions) -> CudaModelRunner:
        # Pages of 256 tokens round a sequence's capacity up.
        kv_tokens = CASES * (self._sizes.capacity + 256)
        return make_runner(self._config, model, self._device, kv_tokens, options)  # type: ignore[arg-type]

    def _trace(self, runner: CudaModelRunner, along: Trace | None = None, chunk: int | None = None) -> Trace:
        return Trace(runner, self._prompts, self._sizes, along, chunk)

    def checks(self) -> Iterator[Check]:
        twin = random_model(self._config, torch.float32, self._device)
        reference = self._trace(self._runner_of(twin, RunnerOptions(torch.float32, "torch")))
        plain = self._trace(self._runner(attention="torch"), reference)
        limit = max(2 * plain.error(reference), LEAST_ERROR)
        yield Check("torch attention, eager, against float32 (relative)", plain.error(reference), 0.1)

        eager_runner = self._runner()
        name = eager_runner.attention_backend
        eager = self._trace(eager_runner, reference)
        yield Check(f"{name} attention, eager, against float32", eager.error(reference), limit)
        chunked = self._trace(eager_runner, reference, self._sizes.chunk)
        yield Check(f"{name}: chunked prefill against whole", chunked.error(eager), limit)
        tie = 2 * max(plain.largest_difference(reference), LEAST_ERROR)
        graph_runner = self._runner(graphs=True)
        graphed = self._trace(graph_runner, reference)
        yield Check(f"{name}: decode graphs against eager", graphed.error(eager), limit)
        yield Check("greedy tokens, graphs against eager (logits apart; 0: equal)", graphed.worst_flip(eager), tie)
        yield self._pipelined_tokens(graph_runner)
        yield self._sampled_tokens()
        yield from self._float8(reference)

    def _pipelined_tokens(self, runner: CudaModelRunner) -> Check:
        served = [
            Sequences(runner, self._prompts, self._sizes.capacity).serve(self._sizes.decode, pipelined=pipelined)
            for pipelined in (False, True)
        ]
        differing = sum(a != b for one, other in zip(*served, strict=True) for a, b in zip(one, other, strict=True))
        return Check("tokens fed on the device against through the host (tokens differing)", differing, 0)

    def _sampled_tokens(self) -> Check:
        rng = random.Random(1)
        rows = 48
        logits = torch.randn(rows, self._config.vocab_size, generator=torch.Generator().manual_seed(2)) * 3
        card = replace(self._runner(attention="torch").card, eos_token_ids=(0,))
        sequences = [
            LiveSequence(SeqId(i + 1), 0, RequestId(f"r{i}"), [1, 2, 3], 2, _params(rng), UnitHash(b""))
            for i in range(rows)
        ]
        expected = [one.token for one in sample(logits, sequences, card)]
        drawn = sample_on_device(logits.to(self._device), [SampleRow(s, s.num_output_tokens) for s in sequences], card)
        differing = sum(a != b for a, b in zip(drawn.tokens.tolist(), expected, strict=True))
        return Check("tokens sampled on the device against on the CPU (tokens differing)", differing, 0)

    def _float8(self, reference: Trace) -> Iterator[Check]:
        options = RunnerOptions(self._dtype, "torch", kv_format=Float8KV(self._dtype))
        kv = self._trace(self._runner_of(self._model, options), reference)
        yield Check("FP8 KV against float32", kv.error(reference), FLOAT8_KV_ERROR)
        if self._matmul is None:
            return
        hidden = self._config.hidden_size
        generator = torch.Generator().manual_seed(3)
        x, w = (torch.randn(n, hidden, generator=generator).to(self._device) for n in (33, 64))
        operands = (*quantize_rows(x), *quantize_rows(w), torch.float32)
        yield Check(
            "FP8 matmul against its emulation", relative_error(self._matmul(*operands), emulated(*operands)), 2**-7
        )
        model = float8_model(self._config, self._dtype, self._device, self._matmul)
        for graphs in (False, True):
            trace = self._trace(self._runner_of(model, RunnerOptions(self._dtype, graphs=graphs)), reference)
            name = "FP8 weights against float32" + (", graphs" if graphs else "")
            yield Check(name, trace.error(reference), FLOAT8_WEIGHTS_ERROR)


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        100,
        temperature=rng.choice([0.0, 0.5, 1.0]),
        top_k=rng.choice([0, 5, 40, 2000]),
        top_p=rng.choice([1.0, 0.9, 0.5]),
        min_p=rng.choice([0.0, 0.05]),
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        seed=rng.getrandbits(64),
    )
