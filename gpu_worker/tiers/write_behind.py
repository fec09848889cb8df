"""One thread for each store below the host: writes what the host evicts, and keeps the store in order meanwhile."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from gpu_worker.tiers.port import LowerStore, StoredUnit
from observability.tier_metrics import TierMetrics
from wire.ids import UnitHash

log = logging.getLogger("gpu_worker.tiers")

UPKEEP_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 5.0
"""A write under way gets this long to end; what is queued behind it is dropped."""


class WriteBehind:
    """The thread lives from start() to stop(). Its queue is bounded by the slots the host has to spare: every
    unit in it holds one."""

    def __init__(self, store: LowerStore, metrics: TierMetrics) -> None:
        self.store = store
        self._metrics = metrics
        self._queue: deque[tuple[UnitHash, StoredUnit]] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._is_cleared = False  # and what was stored is not removed yet
        self._is_busy = False
        self._thread = threading.Thread(target=self._serve, name=f"kv-{store.tier}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._drop_queued()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning(
                "a write is still running after %s s; leaving it", STOP_TIMEOUT_S, extra={"tier": self.store.tier}
            )

    def offer(self, unit_hash: UnitHash, unit: StoredUnit) -> None:
        """Store it later, and release it."""
        with self._changed:
            if not self._stopping:
                self._queue.append((unit_hash, unit))
                self._changed.notify_all()
                return
        unit.release()

    def clear(self) -> None:
        """Neither what is stored nor what is queued is to be trusted. What is being written is dropped after it was.

        The store's upkeep, which removes what others could read, runs at once, in the writer's thread, and before it
        stops: who clears does not wait for it."""
        self._drop_queued()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_busy)
            self.store.clear()
            self._is_cleared = True
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything offered so far is written, or timeout_s have passed (False)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._is_busy, timeout_s)

    def _drop_queued(self) -> None:
        with self._changed:
            dropped = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        for _, unit in dropped:  # not under our lock: who evicts holds the host's, and then wants ours
            unit.release()

    def _serve(self) -> None:
        upkeep_due_s = time.monotonic()
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._stopping or self._is_cleared,
                    max(0.0, upkeep_due_s - time.monotonic()),
                )
                if self._is_cleared:
                    upkeep_due_s, self._is_cleared = time.monotonic(), False
                elif self._stopping:
                    return
                job = self._queue.popleft() if self._queue else None
                self._is_busy = True
            try:
                if job is not None:
                    self._write(*job)
                if time.monotonic() >= upkeep_due_s:
                    upkeep_due_s = time.monotonic() + UPKEEP_INTERVAL_S
                    self.store.upkeep()
                    self._metrics.set_contents(self.store.tier, self.store.num_units, self.store.num_bytes)
            except Exception:  # a store's defect costs that unit, not the tier
                log.exception("the tier failed", extra={"tier": self.store.tier})
            finally:
                with self._changed:
                    self._is_busy = False
                    self._changed.notify_all()

    def _write(self, unit_hash: UnitHash, unit: StoredUnit) -> None:
        with unit:
            if self.store.put(unit_hash, unit.encoded):
                self._metrics.saved(self.store.tier)
            else:
                self._metrics.dropped(self.store.tier)
