"""How long a step, or a pull of KV, takes, predicted: the simulated worker waits that long. Pure.

A roofline over the mixed batch (Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009): a step reads the weights
once and the KV of every context, while it computes every token; whichever takes longer is what it takes.

    step = fixed + max(weights + context_tokens · context_token,
                       prefill_tokens · prefill_token + decode_tokens · decode_token)
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_worker.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds, each ≥ 0. All 0: a step takes no time of its own."""

    fixed_us: float = 0.0
    """Of every step, whatever is in it: launches, host work."""
    weights_us: float = 0.0
    """Reading the weights once."""
    context_token_us: float = 0.0
    """Reading one position's KV."""
    prefill_token_us: float = 0.0
    """Computing one token of a prefill chunk."""
    decode_token_us: float = 0.0
    """Computing one decode."""

    def step_us(self, *, prefill_tokens: int, decode_tokens: int, context_tokens: int) -> float:
        """Microseconds of a step; context_tokens: KV positions its attention reads, over all sequences."""
        memory_us = self.weights_us + context_tokens * self.context_token_us
        compute_us = prefill_tokens * self.prefill_token_us + decode_tokens * self.decode_token_us
        return self.fixed_us + max(memory_us, compute_us)

    def batch_us(self, batch: StepBatch) -> float:
        """Microseconds of the step that `batch` is; a query of one token is a decode."""
        decodes = batch.query_lens.count(1)
        return self.step_us(
            prefill_tokens=len(batch.token_ids) - decodes,
            decode_tokens=decodes,
            context_tokens=sum(batch.context_lens),
        )


@dataclass(frozen=True, slots=True)
class PullCost:
    """Microseconds, each ≥ 0: what units of KV from another worker take, beside what moving messages really takes."""

    fixed_us: float = 0.0
    """Of each pull: asking, and the way there and back."""
    unit_us: float = 0.0
    """Of each unit: its bytes ÷ bandwidth."""

    def pull_us(self, num_units: int) -> float:
        """Microseconds of a pull of so many units."""
        return self.fixed_us + num_units * self.unit_us
