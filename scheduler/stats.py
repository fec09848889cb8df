"""What the engine tells about itself, for metrics and for the card gateways read. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.page_pool import PoolCounts
from wire.ids import WorkerId
from wire.plan import ModelCard, Role, StepTiming


@dataclass(frozen=True, slots=True)
class WorkerStats:
    worker_id: WorkerId
    running: int
    num_pages: int
    pages: PoolCounts
    role: Role = Role.BOTH
    num_pulling: int = 0
    """Pulls into its pages that are not over."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    waiting: int
    running: int
    preemptions: int
    displaced: int
    """Sequences queued again because their worker was lost."""
    workers: list[WorkerStats]
    model: ModelCard | None
    """None until a worker was seen."""
    max_request_tokens: int
    """prompt + max_tokens that the largest pool holds; 0 without a worker."""
    predicted_drain_s: float
    """Time the waiting prompts take at the measured prefill rate."""


class PrefillRate:
    """Prefill tokens per second over all workers, smoothed over steps that ran a chunk."""

    SMOOTHING = 0.1

    def __init__(self) -> None:
        self.tokens_per_s: float | None = None

    def add(self, timing: StepTiming) -> None:
        elapsed_s = timing.step_us * 1e-6
        if not timing.prefill_tokens or elapsed_s <= 0:
            return
        rate = timing.prefill_tokens / elapsed_s
        last = self.tokens_per_s
        self.tokens_per_s = rate if last is None else last + self.SMOOTHING * (rate - last)

    def drain_s(self, tokens: int, num_workers: int) -> float:
        """How long the workers take for so many tokens; 1 s while nothing was measured."""
        if self.tokens_per_s is None or not num_workers:
            return 1.0
        return tokens / (self.tokens_per_s * num_workers)
