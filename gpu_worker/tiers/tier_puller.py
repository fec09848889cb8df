"""Brings units from this worker's own tiers back into its pages: the pulls whose source is the worker itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from gpu_worker.transfer.port import Bytes, KvPages, LowerTiers, Puller, RunningPull, UnitPlace
from wire.ids import UnitHash, WorkerId
from wire.plan import LOWER_TIERS, KvPull, PullReport, Tier

log = logging.getLogger("gpu_worker.tiers")

PULL_THREADS = 2
"""More wait behind them, in the order they came."""
WRITE_UNITS = 8
"""Units written to the pages together: a call for each layer, whatever their number."""


class TierPuller:
    """Implements gpu_worker.transfer.port.Puller; use as a context manager, inside which all pulls must end."""

    def __init__(self, tiers: LowerTiers, kv: KvPages) -> None:
        self._tiers = tiers
        self._kv = kv
        self._threads = ThreadPoolExecutor(PULL_THREADS, thread_name_prefix="kv-tier-pull")

    def __enter__(self) -> TierPuller:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._threads.shutdown()

    def begin(self, pull: KvPull, places: Sequence[UnitPlace], report: Callable[[PullReport], None]) -> RunningPull:
        running = _TierPull(self._tiers, self._kv, pull, places, report)
        self._threads.submit(running.run)
        return running


class OwnOrOther:
    """Implements gpu_worker.transfer.port.Puller: from the own tiers, or from another worker, by the pull's source."""

    def __init__(self, worker_id: WorkerId, *, own: Puller, other: Puller) -> None:
        self._worker_id = worker_id
        self._own = own
        self._other = other

    def begin(self, pull: KvPull, places: Sequence[UnitPlace], report: Callable[[PullReport], None]) -> RunningPull:
        puller = self._own if pull.source_worker_id == self._worker_id else self._other
        return puller.begin(pull, places, report)


class _TierPull:
    """Implements gpu_worker.transfer.port.RunningPull."""

    def __init__(
        self,
        tiers: LowerTiers,
        kv: KvPages,
        pull: KvPull,
        places: Sequence[UnitPlace],
        report: Callable[[PullReport], None],
    ) -> None:
        self._tiers = tiers
        self._kv = kv
        self._pull = pull
        self._places = places
        self._report = report
        self._begun_s = time.monotonic()
        self._renewed_s = self._begun_s
        self._cancelled = threading.Event()
        self._over = threading.Event()
        self._num_units = 0  # of the leading ones, in their pages

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None:
        self._cancelled.set()

    def wait(self) -> None:
        self._over.wait()

    def run(self) -> None:
        """In a thread of its own. Raises nothing."""
        slowest: Tier | None = None
        try:
            found = self._tiers.find(self._pull.unit_hashes)
            failure = self._bring(self._pull.unit_hashes[: len(found)])
            used = found[: self._num_units]
            slowest = max(used, key=LOWER_TIERS.index, default=None)
        except Exception as error:  # a tier's defect costs this pull, not the thread
            log.exception("a pull from the tiers failed", extra={"pull": self._pull.pull_id})
            failure = f"{type(error).__name__}: {error}"
        self._report(
            PullReport(
                self._pull.pull_id,
                done=True,
                num_units=self._num_units,
                failure=failure,
                transport="" if slowest is None else slowest,
                num_bytes=self._num_units * self._kv.unit_bytes,
                elapsed_us=round((time.monotonic() - self._begun_s) * 1e6),
            )
        )
        self._over.set()

    def _bring(self, found: Sequence[UnitHash]) -> str | None:
        """Write these units to their places, in order, up to the first that cannot be had. Why not all asked for."""
        for start in range(0, len(found), WRITE_UNITS):
            units = []
            for unit_hash in found[start : start + WRITE_UNITS]:
                if self._cancelled.is_set():
                    return "cancelled"
                unit = self._tiers.read(unit_hash)
                if unit is None:
                    break
                units.append(unit)
                self._renew()
            self._write(units)
            if len(units) < len(found[start : start + WRITE_UNITS]):
                return f"unit {self._num_units} of {len(self._pull.unit_hashes)}: gone or damaged"
        asked = len(self._pull.unit_hashes)
        return None if len(found) == asked else f"unit {len(found)} of {asked}: in no tier"

    def _write(self, units: list[Bytes]) -> None:
        if not units:
            return
        places = self._places[self._num_units : self._num_units + len(units)]
        for layer in range(self._kv.format.num_layers):
            self._kv.write(layer, places, np.stack([unit[layer] for unit in units]))
        self._num_units += len(units)

    def _renew(self) -> None:
        now_s = time.monotonic()
        if now_s - self._renewed_s >= self._pull.lease_ms / 3000:
            self._renewed_s = now_s
            self._report(PullReport(self._pull.pull_id, done=False))
