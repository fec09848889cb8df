"""What lies in the cell's Redis tier, whoever stored it: units there outlive their worker. Pure.

Any worker with the same layout (wire.plan.SharedTier) reads them, by a pull from itself. The table follows what workers
say while they live. What nobody watches any more is taken to be there until its TTL is over, until more was stored
since than the tier's budget holds (Redis lets go of what was stored first), or until a pull finds it missing: a wrong
entry costs one pull that fails, and the table never outgrows the tier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from wire.ids import UnitHash
from wire.plan import SharedTier, TierUnits, WorkerInfo

MAX_EXPIRED: Final = 4096
"""About 1 ms."""


class SharedUnits:
    def __init__(self) -> None:
        self._layouts: dict[str, OrderedDict[UnitHash, float]] = {}  # unit → until when; longest known first

    def __len__(self) -> int:
        return sum(map(len, self._layouts.values()))

    def readable_by(self, worker: WorkerInfo) -> Collection[UnitHash]:
        """What the worker can bring to its pages; to be asked, not kept."""
        return () if worker.shared_tier is None else self._layouts.get(worker.shared_tier.layout, ())

    def changed(self, tier: SharedTier, units: TierUnits, now: float) -> None:
        """A worker saw these go, and found or stored those."""
        self._forget(tier, units.dropped)
        if not units.stored:
            return
        known = self._layouts.setdefault(tier.layout, OrderedDict())
        until = now + tier.ttl_ms * 1e-3
        for unit_hash in units.stored:
            known[unit_hash] = until
            known.move_to_end(unit_hash)
        while len(known) > tier.max_units:
            known.popitem(last=False)
        self._drop_if_empty(tier.layout)

    def missing(self, worker: WorkerInfo, units: Sequence[UnitHash]) -> bool:
        """A pull by the worker from itself ended before the first of these. Was that one in the table, none of them is
        any more: its neighbours were stored at its time. False: it was not, and the pull failed for another reason."""
        if worker.shared_tier is None or not units or units[0] not in self.readable_by(worker):
            return False
        self._forget(worker.shared_tier, units)
        return True

    def void(self, worker: WorkerInfo, units: Iterable[UnitHash]) -> None:
        """The worker does not stand by what it stored."""
        if worker.shared_tier is not None:
            self._forget(worker.shared_tier, units)

    def expire(self, now: float) -> None:
        """Forget what is too old, MAX_EXPIRED of each layout at most: what one worker found when it started is too old
        all at once. Where workers' TTLs differ, one with a longer life may keep those after it."""
        for layout, known in list(self._layouts.items()):
            for _ in range(min(len(known), MAX_EXPIRED)):
                if next(iter(known.values())) > now:
                    break
                known.popitem(last=False)
            self._drop_if_empty(layout)

    def _forget(self, tier: SharedTier, units: Iterable[UnitHash]) -> None:
        known = self._layouts.get(tier.layout)
        if known is not None:
            for unit_hash in units:
                known.pop(unit_hash, None)
            self._drop_if_empty(tier.layout)

    def _drop_if_empty(self, layout: str) -> None:
        if not self._layouts[layout]:
            del self._layouts[layout]
