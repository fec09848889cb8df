"""Times one step by its parts, for its report."""

from __future__ import annotations

import time

from gpu_worker.batching import StepEntry
from gpu_worker.model_port import StepOutput
from wire.plan import StepTiming


class StepWatch:
    """Build (copies included), forward, and sample, which the runner tells apart."""

    def __init__(self) -> None:
        self._started_unix_ns = time.time_ns()
        self._laps_ns = [time.perf_counter_ns()]

    def lap(self) -> None:
        self._laps_ns.append(time.perf_counter_ns())

    def restart(self) -> None:
        """The step before has only now ended: building this one was hidden behind it, and its own time begins."""
        self._started_unix_ns = time.time_ns()
        self._laps_ns = [time.perf_counter_ns()] * 2

    def timing(self, entries: list[StepEntry], output: StepOutput) -> StepTiming:
        started, built, stepped = self._laps_ns
        return StepTiming(
            started_unix_ns=self._started_unix_ns,
            build_us=(built - started) // 1000,
            forward_us=max(0, (stepped - built) // 1000 - output.sample_us),
            sample_us=output.sample_us,
            prefill_tokens=sum(entry.end - entry.start for entry in entries if entry.is_prefill),
            decode_tokens=sum(1 for entry in entries if not entry.is_prefill),
            context_tokens=sum(entry.end for entry in entries),
        )
