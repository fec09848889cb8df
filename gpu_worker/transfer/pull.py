"""One pull on its way: what has come, what its scheduler hears of it, and its one end.

A pull that has ended writes nothing more, at once and whatever its thread waits for: pages are written under the pull's
own lock, one layer at most at a time, and never after its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from gpu_worker.transfer.port import Bytes, KvPages, UnitPlace
from wire.plan import KvPull, PullReport

RENEWALS_PER_LEASE = 3
MIN_LEASE_MS = 50
"""A shorter lease would be over before anybody could renew it."""


class PullOver(Exception):
    """To the thread of a pull that was ended meanwhile."""


class Pull:
    """One pull: implements gpu_worker.transfer.port.RunningPull, and is what its carrier writes through."""

    def __init__(
        self,
        pull: KvPull,
        places: Sequence[UnitPlace],
        kv: KvPages,
        report: Callable[[PullReport], None],
        now: Callable[[], float],
    ) -> None:
        self.request = pull
        self.places = places
        self.transport = ""
        self._kv = kv
        self._report = report
        self._now = now
        self._lock = threading.Lock()
        self._is_ending = False
        self._ended = False
        self._over = threading.Event()
        self._interrupt: Callable[[], object] = lambda: None
        self._layers = np.zeros(len(places), np.int64)  # of each unit: how many are here and right
        self._num_bytes = 0
        self._begun_s = self.heard_s = self._renewed_s = now()
        self.is_running = False

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    @property
    def is_ending(self) -> bool:
        """Nothing more need be brought."""
        return self._is_ending

    def cancel(self) -> None:
        """End now; its report is given before this returns."""
        self.end("cancelled")

    def wait(self) -> None:
        """Until its last report was given."""
        self._over.wait()

    @property
    def lease_s(self) -> float:
        return max(self.request.lease_ms, MIN_LEASE_MS) / 1000

    def started(self) -> None:
        """A thread carries it out from now on, and its source is expected to be heard."""
        self.heard()
        self.is_running = True

    def on_end(self, interrupt: Callable[[], object]) -> None:
        """What wakes the carrier up when the pull is ended from outside. Raises PullOver when it was before."""
        with self._lock:
            if self._ended:
                raise PullOver
            self._interrupt = interrupt

    def heard(self) -> None:
        """The source gave a sign of life."""
        self.heard_s = self._now()

    def store(self, layer: int, first: int, data: Bytes) -> None:
        """Write one layer of the units from `first` on, which are known to be right: [num_units, 2, bytes]."""
        with self._writing():
            self._kv.write(layer, self.places[first : first + len(data)], data)
        self.arrived(range(first, first + len(data)), 1)

    def copy(self, copy: Callable[[], None]) -> None:
        """Let `copy` write to places of this pull. They count when `arrived` says so."""
        with self._writing():
            copy()
        self.heard()

    def arrived(self, units: Sequence[int], num_layers: int) -> None:
        """So many more layers of these units are here, and right."""
        self._layers[np.asarray(units, np.int64)] += num_layers
        self._num_bytes += len(units) * num_layers * 2 * self._kv.format.unit_layer_bytes
        self.heard()

    def renew(self, now: float) -> None:
        """Report that it goes on, if that is so and it is time."""
        period_s = self.lease_s / RENEWALS_PER_LEASE
        goes_on = not self.is_running or self.heard_s > self._renewed_s
        if now - self._renewed_s < period_s or not goes_on:
            return
        with self._lock:  # so that none comes after the last report
            if not self._ended:
                self._renewed_s = now
                self._report(self._progress(done=False))

    def end(self, failure: str | None) -> None:
        """Over, unless it is: the units that are whole count; `failure` says why not all of them."""
        self._is_ending = True
        with self._lock:
            if self._ended:
                return
            self._ended = True
        short = np.flatnonzero(self._layers < self._kv.format.num_layers)
        report = self._progress(done=True)
        report.num_units = int(short[0]) if len(short) else len(self.places)
        report.failure = (failure or "the source gave no more") if len(short) else None
        try:
            self._report(report)
        finally:
            self._over.set()
            self._interrupt()  # what its thread waits for; nobody waits for that

    def _progress(self, *, done: bool) -> PullReport:
        return PullReport(
            self.request.pull_id,
            done,
            transport=self.transport,
            num_bytes=self._num_bytes,
            elapsed_us=int((self._now() - self._begun_s) * 1e6),
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with self._lock:
            if self._ended:
                raise PullOver
            yield
