"""Pulls of a worker without a model: carried out in earnest, over few bytes, and as slow as a model's would be.

begin ─▸ the pull itself: leases, generations, failures ─▸ waits until its predicted time is over ─▸ last report
         └───────── PullReport(done=False) at each third of the lease ──────────┘ cancelled: at once
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from gpu_worker.step_cost import PullCost
from gpu_worker.transfer.port import Puller, RunningPull, UnitPlace
from wire.plan import KvPull, PullReport

RENEWALS_PER_LEASE = 3


class SimulatedPuller:
    """Implements gpu_worker.transfer.port.Puller: what succeeds takes its predicted time, one pull after the other, as
    they share the worker's link. Failures are reported at once."""

    def __init__(self, puller: Puller, cost: PullCost, *, now: Callable[[], float] = time.monotonic) -> None:
        self._puller = puller
        self._cost = cost
        self._now = now
        self._lock = threading.Lock()
        self._link_free_s = 0.0

    def begin(self, pull: KvPull, places: Sequence[UnitPlace], report: Callable[[PullReport], None]) -> RunningPull:
        running = _SimulatedPull(pull, report, self._reserve_link, self._now)
        running.inner = self._puller.begin(pull, places, running.take)
        return running

    def _reserve_link(self, begun_s: float, num_units: int) -> float:
        """When a pull begun then is over."""
        with self._lock:
            self._link_free_s = max(begun_s, self._link_free_s) + 1e-6 * self._cost.pull_us(num_units)
            return self._link_free_s


class _SimulatedPull:
    """Implements gpu_worker.transfer.port.RunningPull."""

    inner: RunningPull

    def __init__(
        self,
        pull: KvPull,
        report: Callable[[PullReport], None],
        reserve_link: Callable[[float, int], float],
        now: Callable[[], float],
    ) -> None:
        self._pull = pull
        self._report = report
        self._reserve_link = reserve_link
        self._now = now
        self._begun_s = now()
        self._cancelled = threading.Event()

    @property
    def is_over(self) -> bool:
        return self.inner.is_over

    def cancel(self) -> None:
        self._cancelled.set()
        self.inner.cancel()

    def wait(self) -> None:
        self.inner.wait()

    def take(self, report: PullReport) -> None:
        """In a thread of the puller's, whose last report of a pull is done with when this returns."""
        if report.done and report.failure is None:
            ends_s = self._reserve_link(self._begun_s, report.num_units)
            if self._wait_until(ends_s):
                report.elapsed_us = max(report.elapsed_us, round(1e6 * (ends_s - self._begun_s)))
            else:
                report.num_units, report.failure = 0, "cancelled"
        self._report(report)

    def _wait_until(self, ends_s: float) -> bool:
        """False when it is cancelled meanwhile."""
        period_s = self._pull.lease_ms / 1000 / RENEWALS_PER_LEASE
        while (left_s := ends_s - self._now()) > 0:
            if self._cancelled.wait(min(left_s, period_s)):
                return False
            if left_s > period_s:
                self._report(PullReport(self._pull.pull_id, done=False))
        return True
