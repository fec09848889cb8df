"""The prefix index in memory: which worker holds which unit, in which tier (design §5). Pure.

A dict for each worker is the truth: unit hash ─▸ its tiers. A short chain that few workers hold is walked in these. For
any other there is one table for all workers, so that a lookup costs the length of the chain, however many they are:

    unit hash ─▸ mask, three bits for each worker's slot:  … | slot 1: any, host, device | slot 0: any, host, device

A bit says that the worker holds the unit in that tier or a faster one. A lookup ANDs the masks along the chain; a bit
that goes out at unit n says that this prefix is n units long. The table takes changes in batches (mask_table.py says
why): what changed since the last one is `pending`, until it is enough for a batch or in a chain that is looked up.

The end of a worker only takes it out of the lookups. Its bits are cleared a few at every later change, and then its
slot is given out again: clearing 100,000 units at once would hold up the event loop, in the very moment when a dead
worker's requests must find another one, or when it comes back and says all that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain as joined
from itertools import repeat
from typing import Final

import numpy as np

from kvstore.mask_table import Masks, MaskTable
from wire.ids import UnitHash, WorkerId
from wire.plan import LOWER_TIERS, Tier

SWEEP_UNITS: Final = 4
"""Units of ended workers cleared for each that changes. More than one, so that the sweep outruns growth."""
MAX_SWEEP_UNITS: Final = 4096
"""Cleared by one change, however large, for each worker that ended and is not cleared yet: so what is left to clear
stays bounded even where one comes back again and again and nothing else changes."""
FEW_UNITS: Final = 192
"""Chain units × workers that hold its first one, up to which these are asked one by one."""
STRETCH_UNITS: Final = 512
"""Of a chain, looked up in the table at a time."""
BATCH_UNITS: Final = 512
"""Pending changes that are put into the table."""
PUT_UNITS: Final = 4096
"""At most, at once: a put takes ten times their memory meanwhile."""

_TIER_BITS: Final = {tier: 1 << i for i, tier in enumerate((Tier.DEVICE, *LOWER_TIERS))}
_ON_DEVICE: Final = _TIER_BITS[Tier.DEVICE]
_ON_DEVICE_OR_HOST: Final = _ON_DEVICE | _TIER_BITS[Tier.HOST]
_DEVICE, _HOST, _ANY = 1, 2, 4
_SLOT_BITS: Final = 3
_SLOT: Final = (1 << _SLOT_BITS) - 1
_COLUMN_SLOTS: Final = 64 // _SLOT_BITS


def _levels(tier_bits: int) -> int:
    if tier_bits & _TIER_BITS[Tier.DEVICE]:
        return _DEVICE | _HOST | _ANY
    if tier_bits & _TIER_BITS[Tier.HOST]:
        return _HOST | _ANY
    return _ANY if tier_bits else 0


_LEVELS: Final = np.array([_levels(tier_bits) for tier_bits in range(1 << len(_TIER_BITS))], np.uint64)
"""By a unit's tier bits."""


@dataclass(frozen=True, slots=True)
class TierPrefix:
    """How much of a chain's beginning a worker holds, in units."""

    device: int
    """Leading units that lie in its pages."""
    host: int
    """Leading units each of which lies in its pages or in its host memory; ≥ device."""
    any_tier: int
    """Leading units each of which lies in its pages or in one of its lower tiers; ≥ host."""


@dataclass(slots=True)
class _Holder:
    """A worker, or what is left to clear of one that ended."""

    slot: int
    tiers: dict[UnitHash, int] = field(default_factory=dict)
    """Unit hash → _TIER_BITS."""

    column: int = field(init=False)
    """Of the masks in which its bits are."""
    shift: int = field(init=False)
    """Of its bits in the column."""

    def __post_init__(self) -> None:
        self.column, place = divmod(self.slot, _COLUMN_SLOTS)
        self.shift = place * _SLOT_BITS

    def walk(self, chain: Sequence[UnitHash]) -> TierPrefix:
        """How much of the chain it holds. O(units of the chain)."""
        found = list(map(self.tiers.get, chain, repeat(0)))
        if 0 in found:
            found = found[: found.index(0)]
        device = host = any_tier = len(found)
        if found.count(_ON_DEVICE) < any_tier:
            device = next((n for n, bits in enumerate(found) if not bits & _ON_DEVICE), any_tier)
            host = next((n for n, bits in enumerate(found) if not bits & _ON_DEVICE_OR_HOST), any_tier)
        return TierPrefix(device, host, any_tier)


_TIERS: Final = [
    tuple(tier for tier, bit in _TIER_BITS.items() if tier_bits & bit) for tier_bits in range(1 << len(_TIER_BITS))
]


class PrefixTwin:
    """Invariant: masks[unit] == the or of what each holder's tiers[unit] says, ended ones included, but for pending."""

    def __init__(self, *, few_units: int = FEW_UNITS, batch_units: int = BATCH_UNITS) -> None:
        """See the constants."""
        self._few_units = few_units
        self._batch_units = batch_units
        self._masks = MaskTable()
        self._holders: dict[WorkerId, _Holder] = {}
        self._ended: list[_Holder] = []
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._pending: list[tuple[_Holder, list[UnitHash]]] = []
        self._num_pending = 0
        self._pending_units: set[UnitHash] = set()

    def add(self, worker_id: WorkerId, unit_hashes: Iterable[UnitHash], tier: Tier) -> None:
        """The worker holds these units there. Idempotent. O(units): 100,000 hold up the caller for a tenth
        of a second."""
        holder = self._holders.get(worker_id) or self._begin(worker_id)
        tiers, bit = holder.tiers, _TIER_BITS[tier]
        changed = []
        for unit_hash in unit_hashes:
            before = tiers.get(unit_hash, 0)
            if not before & bit:
                tiers[unit_hash] = before | bit
                changed.append(unit_hash)
        self._changed(holder, changed)

    def remove(self, worker_id: WorkerId, unit_hashes: Iterable[UnitHash], tier: Tier) -> None:
        """The worker does not hold these units there, or no longer. Idempotent."""
        holder = self._holders.get(worker_id)
        if holder is None:
            return
        tiers, bit = holder.tiers, _TIER_BITS[tier]
        changed = []
        for unit_hash in unit_hashes:
            before = tiers.get(unit_hash, 0)
            if before & bit:
                if before == bit:
                    del tiers[unit_hash]
                else:
                    tiers[unit_hash] = before & ~bit
                changed.append(unit_hash)
        self._changed(holder, changed)

    def drop_worker(self, worker_id: WorkerId) -> None:
        """Everything of it, at once. O(1): see above. Idempotent."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._ended.append(holder)

    @property
    def table_bytes(self) -> int:
        """Memory of the table that all workers share, which Python's allocator does not see."""
        return self._masks.num_bytes

    def count(self, worker_id: WorkerId) -> int:
        """Units it holds, each counted once whatever its tiers. O(1)."""
        holder = self._holders.get(worker_id)
        return 0 if holder is None else len(holder.tiers)

    def hashes(self, worker_id: WorkerId) -> list[UnitHash]:
        """The units it holds, in whatever tier. O(its units), but a hundredth of units()."""
        holder = self._holders.get(worker_id)
        return [] if holder is None else list(holder.tiers)

    def tiers(self, worker_id: WorkerId, unit_hash: UnitHash) -> tuple[Tier, ...]:
        """Where it holds the unit, fastest first; empty: nowhere."""
        holder = self._holders.get(worker_id)
        return () if holder is None else _TIERS[holder.tiers.get(unit_hash, 0)]

    def units(self, worker_id: WorkerId) -> dict[Tier, set[UnitHash]]:
        """What it holds, every tier named. O(its units)."""
        units: dict[Tier, set[UnitHash]] = {tier: set() for tier in _TIER_BITS}
        holder = self._holders.get(worker_id)
        if holder is not None:
            named = [(bit, units[tier]) for tier, bit in _TIER_BITS.items()]
            for unit_hash, bits in holder.tiers.items():
                for bit, members in named:
                    if bits & bit:
                        members.add(unit_hash)
        return units

    def lookup(self, chain: Sequence[UnitHash]) -> dict[WorkerId, TierPrefix]:
        """The prefix of the chain that each worker holds; workers without its first unit are left out.

        O(units of the longest prefix + workers).
        """
        if not chain:
            return {}
        holders = self._holders
        if len(chain) <= self._few_units:
            first = chain[0]
            holders = {worker_id: holder for worker_id, holder in holders.items() if first in holder.tiers}
            if len(holders) * len(chain) <= self._few_units:
                return {worker_id: holder.walk(chain) for worker_id, holder in holders.items()}
        if not self._pending_units.isdisjoint(chain):
            self._settle()
        return self._look_up_settled(chain, holders)

    def _look_up_settled(
        self, chain: Sequence[UnitHash], holders: dict[WorkerId, _Holder]
    ) -> dict[WorkerId, TierPrefix]:
        found = self._masks.get(chain[:STRETCH_UNITS])
        firsts = [int(masks[0]) for masks in found]
        holders = {w: holder for w, holder in holders.items() if firsts[holder.column] >> holder.shift & _SLOT}
        alive = [0] * len(firsts)
        for holder in holders.values():
            alive[holder.column] |= _SLOT << holder.shift
        falls: list[list[tuple[int, int]]] = [[] for _ in firsts]
        begin = 0
        while any(alive):
            for column, masks in enumerate(found):
                for left, unit in _changes(masks, alive[column]):
                    falls[column].append((alive[column] & ~left, begin + unit))
                    alive[column] = left
            begin += STRETCH_UNITS
            if begin >= len(chain):
                break
            found = self._masks.get(chain[begin : begin + STRETCH_UNITS])
        for column, left in enumerate(alive):
            falls[column].append((left, len(chain)))
        return _prefixes(holders, falls)

    def _changed(self, holder: _Holder, units: list[UnitHash]) -> None:
        if units:
            self._put_off(holder, units)
        if self._ended:
            self._sweep(1 + len(units))
        if self._num_pending >= self._batch_units:
            self._settle()

    def _put_off(self, holder: _Holder, units: list[UnitHash]) -> None:
        self._pending.append((holder, units))
        self._num_pending += len(units)
        self._pending_units.update(units)

    def _settle(self) -> None:
        """Nothing is pending any more. What is put is what the holders hold now, however often it changed."""
        pending = self._pending
        lengths = [len(units) for _, units in pending]
        units = list(joined.from_iterable(units for _, units in pending))
        bits = joined.from_iterable(map(holder.tiers.get, units, repeat(0)) for holder, units in pending)
        levels = _LEVELS.take(np.fromiter(bits, np.intp, len(units)))
        shifts = np.repeat(np.array([holder.shift for holder, _ in pending], np.uint64), lengths)
        columns = np.repeat([holder.column for holder, _ in pending], lengths)
        for i in range(0, len(units), PUT_UNITS):
            part = slice(i, i + PUT_UNITS)
            self._masks.put(units[part], columns[part], np.uint64(_SLOT) << shifts[part], levels[part] << shifts[part])
        self._pending, self._num_pending = [], 0  # only now: without memory they are still to be put
        self._pending_units = set()

    def _begin(self, worker_id: WorkerId) -> _Holder:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        holder = _Holder(slot)
        if holder.column == self._masks.num_columns:
            self._masks.add_column()
        self._holders[worker_id] = holder
        return holder

    def _sweep(self, num_changes: int) -> None:
        """Clear SWEEP_UNITS of a worker that ended for each change, within bounds. Its slot is free with the last."""
        holder = self._ended[-1]
        num_swept = min(SWEEP_UNITS * num_changes, MAX_SWEEP_UNITS * len(self._ended), len(holder.tiers))
        units = [holder.tiers.popitem()[0] for _ in range(num_swept)]
        self._put_off(holder, units)
        if not holder.tiers:
            self._settle()  # else its slot had two holders
            self._ended.pop()
            self._free_slots.append(holder.slot)


def _changes(masks: Masks, alive: int) -> Iterator[tuple[int, int]]:
    """Of alive & masks[0] & masks[1] …: each new value, and at which unit."""
    before = np.uint64(alive)
    if np.bitwise_and.reduce(masks) & before == before:
        return  # mostly: who is alive holds all of it
    ands = np.bitwise_and.accumulate(masks) & before
    for unit in (0, *(np.flatnonzero(ands[1:] != ands[:-1]) + 1).tolist()):
        left = int(ands[unit])
        if left != alive:
            yield left, unit


def _prefixes(
    holders: dict[WorkerId, _Holder], falls: Sequence[Sequence[tuple[int, int]]]
) -> dict[WorkerId, TierPrefix]:
    """falls: for each column, (bits that went out, at which unit) along the chain."""
    prefixes = {}
    made: dict[tuple[int, int, int], TierPrefix] = {}  # many hold the same, and a frozen record is dear
    for worker_id, holder in holders.items():
        shift = holder.shift
        device = host = any_tier = 0
        for bits, unit in falls[holder.column]:
            levels = bits >> shift & _SLOT
            if levels & _DEVICE:
                device = unit
            if levels & _HOST:
                host = unit
            if levels & _ANY:
                any_tier = unit
        ends = device, host, any_tier
        prefixes[worker_id] = made.get(ends) or made.setdefault(ends, TierPrefix(*ends))
    return prefixes
