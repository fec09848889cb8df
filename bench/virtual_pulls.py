"""KV pulls in virtual time: units are looked up and checked again as the worker does, moving them is a delay.

begin ─▸ the target's link is free ─▸ units found at the source ─▸ fixed + units · unit ─▸ generations checked, done
         └─── PullReport(done=False) at each third of the lease ───┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from gpu_worker.residency import Found, Residency
from gpu_worker.step_cost import PullCost
from gpu_worker.transfer.port import KvPages, RunningPull, UnitPlace
from wire.plan import KvPull, PullReport

After: TypeAlias = Callable[[float, Callable[[], None]], None]
"""`after(delay_s, call)` in virtual time."""
TRANSPORT = "virtual"


class Source(Protocol):
    """The worker that a pull reads from."""

    residency: Residency

    @property
    def pages(self) -> KvPages: ...

    @property
    def is_stopped(self) -> bool: ...


class VirtualPuller:
    """Implements gpu_worker.transfer.port.Puller for one target: one pull moves at a time, in the order begun."""

    def __init__(
        self, cost: PullCost, pages: KvPages, source_of: Callable[[KvPull], Source | None], after: After
    ) -> None:
        """pages: the target's. source_of: the worker a pull names, None when that life of it is over."""
        self._cost = cost
        self._pages = pages
        self._source_of = source_of
        self._after = after
        self._waiting: list[_VirtualPull] = []

    def begin(self, pull: KvPull, places: Sequence[UnitPlace], report: Callable[[PullReport], None]) -> RunningPull:
        running = _VirtualPull(pull, places, self._pages, report, self._cost, self._after, self._over)
        self._waiting.append(running)
        if len(self._waiting) == 1:
            self._after(0.0, self._start)
        running.renew_lease()
        return running

    def _start(self) -> None:
        if self._waiting:  # else it was cancelled
            first = self._waiting[0]
            first.start(self._source_of(first.pull))

    def _over(self, pull: _VirtualPull) -> None:
        """One is over, most often the one that moved: the link is the next one's."""
        was_moving = pull is self._waiting[0]
        self._waiting.remove(pull)
        if was_moving and self._waiting:
            self._after(0.0, self._start)


class _VirtualPull:
    """Implements gpu_worker.transfer.port.RunningPull."""

    def __init__(
        self,
        pull: KvPull,
        places: Sequence[UnitPlace],
        pages: KvPages,
        report: Callable[[PullReport], None],
        cost: PullCost,
        after: After,
        on_over: Callable[[_VirtualPull], None],
    ) -> None:
        self.pull = pull
        self.is_over = False
        self._places = places
        self._pages = pages
        self._report = report
        self._cost = cost
        self._after = after
        self._on_over = on_over
        self._is_moving = False

    def renew_lease(self) -> None:
        """Say that it goes on, at each third of the lease."""

        def renew() -> None:
            if not self.is_over:
                self._report(PullReport(self.pull.pull_id, done=False))
                self.renew_lease()

        self._after(self.pull.lease_ms / 3000, renew)

    def start(self, source: Source | None) -> None:
        """It is its turn on the target's link. Harmless when it has begun."""
        if self._is_moving:
            return
        self._is_moving = True
        if source is None:
            self._end(0, f"{self.pull.source_worker_id} is gone", 0.0)
            return
        found = source.residency.find(self.pull.unit_hashes)
        took_us = self._cost.pull_us(len(found.places))
        self._after(took_us * 1e-6, lambda: self._arrived(source, found, took_us))

    def _arrived(self, source: Source, found: Found, took_us: float) -> None:
        if self.is_over:  # cancelled: nothing is written any more
            return
        if source.is_stopped:
            self._end(0, f"{self.pull.source_worker_id} died", took_us)
        elif not source.residency.still(found):
            self._end(0, "a page got a new owner meanwhile", took_us)
        else:
            for layer in range(self._pages.format.num_layers):
                units = source.pages.read(layer, found.places)
                self._pages.write(layer, self._places[: len(found.places)], units)
            missing = len(self.pull.unit_hashes) - len(found.places)
            self._end(len(found.places), f"{missing} units are not there" if missing else None, took_us)

    def _end(self, num_units: int, failure: str | None, took_us: float) -> None:
        if self.is_over:  # cancelled
            return
        self.is_over = True
        done = PullReport(self.pull.pull_id, True, num_units, failure, transport=TRANSPORT, elapsed_us=round(took_us))
        self._report(done)
        self._on_over(self)

    def cancel(self) -> None:
        self._after(0.0, lambda: self._end(0, "cancelled", 0.0))

    def wait(self) -> None:
        """Nobody waits in virtual time: a session here ends with its worker, and then nothing of it is read again."""
