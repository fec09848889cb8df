"""The prefix index in memory: which worker holds which unit, in which tier (design §5). Pure.

One dict for all workers, so that a lookup costs the length of the chain, however many workers there are:

    unit hash ─▸ int, three bits for each worker's slot:  … | slot 1: any, host, device | slot 0: any, host, device

A bit says that the worker holds the unit in that tier or a faster one. A lookup ANDs the ints along the chain; a bit
that goes out at unit n says that this prefix is n units long. A dict of its own for each worker says which tiers they
are: what a removal, the audit and the end of a worker need.

The end of a worker only takes its slot out of the mask that lookups begin with. Its bits are cleared a few at every
later change, and then the slot is given out again: clearing 100,000 units at once would hold up the event loop for
tens of milliseconds, in the very moment when a dead worker's requests must find another one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import and_, neg
from typing import Final

from wire.ids import UnitHash, WorkerId
from wire.plan import LOWER_TIERS, Tier

SWEEP_UNITS: Final = 16
"""Units of ended workers that a change clears besides its own work. More than one, so that the sweep outruns growth."""
STRETCH_UNITS: Final = 64
"""Of a chain, looked up at a time: what a chain that nobody holds costs."""
MAX_INTERNED: Final = 4096

_TIER_BITS: Final = {tier: 1 << i for i, tier in enumerate((Tier.DEVICE, *LOWER_TIERS))}
_DEVICE, _HOST, _ANY = 1, 2, 4
_SLOT_BITS: Final = 3
_SLOT: Final = (1 << _SLOT_BITS) - 1


def _levels(tier_bits: int) -> int:
    if tier_bits & _TIER_BITS[Tier.DEVICE]:
        return _DEVICE | _HOST | _ANY
    if tier_bits & _TIER_BITS[Tier.HOST]:
        return _HOST | _ANY
    return _ANY if tier_bits else 0


_LEVELS: Final = [_levels(tier_bits) for tier_bits in range(1 << len(_TIER_BITS))]


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

    def mask(self, tier_bits: int) -> int:
        """This slot's bits for a unit in these tiers."""
        return _LEVELS[tier_bits] << _SLOT_BITS * self.slot


_TIERS: Final = [
    tuple(tier for tier, bit in _TIER_BITS.items() if tier_bits & bit) for tier_bits in range(1 << len(_TIER_BITS))
]


class PrefixTwin:
    """Invariant: masks[unit] & live == the or of holder.mask(holder.tiers[unit]) over all live workers."""

    def __init__(self) -> None:
        self._masks: dict[UnitHash, int] = {}
        self._interned: dict[int, int] = {}
        """Each mask → the one object of that value: there are far fewer masks than units."""
        self._holders: dict[WorkerId, _Holder] = {}
        self._live = 0
        """All bits of every live slot."""
        self._ended: list[_Holder] = []
        self._free_slots: list[int] = []
        self._num_slots = 0

    def add(self, worker_id: WorkerId, unit_hash: UnitHash, tier: Tier) -> None:
        """The worker holds the unit there. Idempotent."""
        holder = self._holders.get(worker_id) or self._begin(worker_id)
        before = holder.tiers.get(unit_hash, 0)
        after = before | _TIER_BITS[tier]
        if after != before:
            holder.tiers[unit_hash] = after
            self._set_mask(unit_hash, self._masks.get(unit_hash, 0) | holder.mask(after))
        if self._ended:
            self._sweep()

    def remove(self, worker_id: WorkerId, unit_hash: UnitHash, tier: Tier) -> None:
        """The worker does not hold the unit there, or no longer. Idempotent."""
        holder = self._holders.get(worker_id)
        if holder is not None:
            before = holder.tiers.get(unit_hash, 0)
            after = before & ~_TIER_BITS[tier]
            if after:
                holder.tiers[unit_hash] = after
            elif before:
                del holder.tiers[unit_hash]
            if after != before:
                self._clear(unit_hash, holder.mask(before) & ~holder.mask(after))
        if self._ended:
            self._sweep()

    def drop_worker(self, worker_id: WorkerId) -> None:
        """Everything of it, at once. O(1): see above. Idempotent."""
        holder = self._holders.pop(worker_id, None)
        if holder is not None:
            self._live &= ~(_SLOT << _SLOT_BITS * holder.slot)
            self._ended.append(holder)

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
        falls = self._falls(chain)
        prefixes: dict[WorkerId, TierPrefix] = {}
        for worker_id, holder in self._holders.items():
            shift = _SLOT_BITS * holder.slot
            device = host = any_tier = 0
            for bits, position in falls:
                levels = bits >> shift & _SLOT
                if levels & _DEVICE:
                    device = position
                if levels & _HOST:
                    host = position
                if levels & _ANY:
                    any_tier = position
            if any_tier:
                prefixes[worker_id] = TierPrefix(device, host, any_tier)
        return prefixes

    def _falls(self, chain: Sequence[UnitHash]) -> list[tuple[int, int]]:
        """(bits that went out, at which unit) along the chain; what is left goes out at its end.

        The ANDs run in C, a stretch of the chain at a time. Bits only go out, so along a stretch the ints only fall,
        and what changed is found by bisection.
        """
        alive = self._live
        falls = []
        position = 0
        while alive and position < len(chain):
            stretch = chain[position : position + STRETCH_UNITS]
            masks = list(map(self._masks.get, stretch, repeat(0)))
            if masks.count(masks[0]) == len(masks):  # mostly; equal masks are one object, so this costs next to nothing
                masks = masks[:1]
            ands = list(accumulate(masks, and_, initial=alive))
            unit = 0
            while ands[unit] != ands[-1]:  # ands[0] is before the stretch's first unit
                unit = bisect_right(ands, -ands[unit], lo=unit, key=neg)
                falls.append((alive & ~ands[unit], position + unit - 1))
                alive = ands[unit]
            position += len(stretch)
        falls.append((alive, len(chain)))
        return falls

    def _begin(self, worker_id: WorkerId) -> _Holder:
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        holder = self._holders[worker_id] = _Holder(slot)
        self._live |= _SLOT << _SLOT_BITS * slot
        return holder

    def _set_mask(self, unit_hash: UnitHash, mask: int) -> None:
        if len(self._interned) > MAX_INTERNED:
            self._interned.clear()  # full → equal masks may be several objects
        self._masks[unit_hash] = self._interned.setdefault(mask, mask)

    def _clear(self, unit_hash: UnitHash, bits: int) -> None:
        left = self._masks[unit_hash] & ~bits
        if left:
            self._set_mask(unit_hash, left)
        else:
            del self._masks[unit_hash]

    def _sweep(self) -> None:
        """Clear up to SWEEP_UNITS of a worker that ended; its slot is free when none is left."""
        holder = self._ended[-1]
        for _ in range(min(SWEEP_UNITS, len(holder.tiers))):
            unit_hash, bits = holder.tiers.popitem()
            self._clear(unit_hash, holder.mask(bits))
        if not holder.tiers:
            self._ended.pop()
            self._free_slots.append(holder.slot)
