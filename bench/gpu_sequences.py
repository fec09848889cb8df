"""Sequences over pages of a runner, stepped without a scheduler, for bench.gpu_check."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gpu_worker.cuda.runner import CudaModelRunner
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from wire.ids import RequestId, SeqId, UnitHash
from wire.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=1 << 30, temperature=0.0)


class Sequences:
    """Each has pages for `capacity` tokens of its own. `computed` says how many tokens of each have their KV."""

    def __init__(
        self,
        runner: CudaModelRunner,
        prompts: Sequence[Sequence[int]],
        capacity: int,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self.runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        pages = -(-capacity // runner.page_size)
        if pages * len(prompts) > runner.num_pages:
            raise ValueError(f"{len(prompts)} sequences of {capacity} tokens do not fit {runner.num_pages} pages")
        self._tables = [list(range(i * pages, (i + 1) * pages)) for i in range(len(prompts))]
        self.live = [
            LiveSequence(SeqId(i + 1), 0, RequestId(f"r{i}"), tokens, len(prompt), sampling, UnitHash(b""))
            for i, (tokens, prompt) in enumerate(zip(self.tokens, prompts, strict=True))
        ]

    def batch(self, counts: Sequence[int], *, fed: bool = False) -> StepBatch:
        """The next counts[i] tokens of each, all last rows sampled. fed: decodes of what the last step drew."""
        batch = StepBatch()
        for i, count in enumerate(counts):
            start, end = self.computed[i], self.computed[i] + count
            table, size = self._tables[i], self.runner.page_size
            if fed:
                batch.fed_rows.append((len(batch.token_ids), i))
            batch.token_ids += [0] * count if fed else self.tokens[i][start:end]
            batch.positions += range(start, end)
            batch.slot_mapping += [table[p // size] * size + p % size for p in range(start, end)]
            batch.query_lens.append(count)
            batch.context_lens.append(end)
            batch.block_tables.append(table[: -(-end // size)])
            batch.logit_rows.append(len(batch.token_ids) - 1)
            self.computed[i] = end
        return batch

    def forward(self, counts: Sequence[int]) -> torch.Tensor:
        """Logits [num_sequences, vocab_size] of the last of the next counts[i] tokens of each."""
        return self.runner.forward(self.batch(counts)).float().clone()

    def prefill(self, chunk: int | None = None) -> torch.Tensor:
        """All tokens of equally long prompts, `chunk` at a time; logits of the last."""
        logits = torch.empty(0)
        while (left := len(self.tokens[0]) - self.computed[0]) > 0:
            logits = self.forward([min(left, chunk or left)] * len(self.tokens))
        return logits

    def decode(self, logits: torch.Tensor) -> torch.Tensor:
        """Append the likeliest token of each row of logits and step it; its logits."""
        for tokens, token in zip(self.tokens, logits.argmax(-1).tolist(), strict=True):
            tokens.append(token)
        return self.forward([1] * len(self.tokens))

    def serve(self, steps: int, *, pipelined: bool) -> list[list[int]]:
        """Prefill, then draw until each has `steps` tokens more; [num_sequences][steps], as the executor would."""
        drawn: list[list[int]] = [[] for _ in self.tokens]
        pending = self.runner.launch(self.batch([len(tokens) for tokens in self.tokens]), self.live)
        for step in range(steps):
            ahead = None
            if pipelined and step + 1 < steps:
                ahead = self.runner.launch(self.batch([1] * len(self.tokens), fed=True), self.live)
            for i, sampled in enumerate(pending.result().sampled):
                assert sampled.token is not None
                self.tokens[i].append(sampled.token)
                drawn[i].append(sampled.token)
            if step + 1 < steps:
                pending = ahead or self.runner.launch(self.batch([1] * len(self.tokens)), self.live)
        return drawn

    def start_decoding(self, context: int) -> None:
        """As if `context` tokens were computed: for timing, where the KV's values do not matter."""
        self.computed = [context] * len(self.tokens)
        for tokens in self.tokens:
            tokens[:] = [1] * (context + 1)

    def rewind(self, num_tokens: int) -> None:
        """Do the last num_tokens of each again."""
        self.computed = [computed - num_tokens for computed in self.computed]
