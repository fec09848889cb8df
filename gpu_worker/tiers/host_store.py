"""Units in host memory: one arena of equal slots, least recently used goes first.

    slot     free ──put──▸ held ──evicted──▸ leaving (a lower store still writes it) ──▸ free
                             └──evicted, and no slot to spare──▸ free

What is evicted stays where it lies until the stores below have written it: nothing is copied for them. `spare_slots`
bounds how many units leave at once; when all are taken, what is evicted next is dropped. A lease keeps a slot from
reuse while somebody reads it.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from gpu_worker.tiers.port import OnChange, StoredUnit, ignore_change
from gpu_worker.tiers.unit_codec import tail_first
from wire.ids import UnitHash
from wire.plan import Tier

OnEvicted: TypeAlias = Callable[[UnitHash, StoredUnit | None], None]
"""(unit hash, unit): the unit is released by whoever is given it. None: there was no slot to spare, and it is lost."""


class HostStore:
    """Thread-safe. All operations are O(1).

    arena: memory of whole slots; slot_bytes: a slot's length, at least a unit's encoded bytes.
    on_change(unit_hash, is_here): under the store's lock, in the order in which it happened.
    on_evicted: told of what makes room, when somebody below may want it.
    """

    tier = Tier.HOST

    def __init__(
        self,
        arena: memoryview,
        slot_bytes: int,
        *,
        spare_slots: int = 0,
        on_change: OnChange = ignore_change,
        on_evicted: OnEvicted | None = None,
    ) -> None:
        self._num_slots = num_slots = len(arena) // slot_bytes
        self.capacity = num_slots - spare_slots
        """Units it holds at most."""
        if self.capacity < 1:
            raise ValueError(f"arena of {len(arena)} bytes: {num_slots} slots, {spare_slots} of them to spare")
        self._arena = arena
        self._slot_bytes = slot_bytes
        self._unused = 0  # slots [unused, num_slots) were never used: small units make millions of slots
        self._free: list[int] = []
        self._held: OrderedDict[UnitHash, int] = OrderedDict()  # least recently used first
        self._held_slots: set[int] = set()
        self._leases: Counter[int] = Counter()
        self._on_change = on_change
        self._on_evicted = on_evicted
        self._lock = threading.RLock()  # a unit may be released by on_evicted

    def put(self, unit_hash: UnitHash, fill: Callable[[memoryview], None]) -> bool:
        """Hold a unit that `fill` writes into its slot; one that is held already is only touched.

        False: every slot is being read or written, and the unit is lost.
        """
        with self._lock:
            if self._touched(unit_hash):
                return True
            slot = self._take_slot()
        if slot is None:
            return False
        try:
            fill(self._memory(slot))
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        with self._lock:
            if self._touched(unit_hash):  # somebody else was faster
                self._free.append(slot)
            else:
                self._held[unit_hash] = slot
                self._held_slots.add(slot)
                self._on_change(unit_hash, True)
        return True

    def get(self, unit_hash: UnitHash) -> StoredUnit | None:
        """The unit's encoded bytes, which stay as they are until released."""
        with self._lock:
            slot = self._held.get(unit_hash)
            return None if slot is None else self._lease(slot)

    def touch(self, chain: Sequence[UnitHash]) -> None:
        """These units of a chain were used: its head is the last to go."""
        with self._lock:
            for unit_hash in tail_first(chain):
                self._touched(unit_hash)

    def drop(self, unit_hash: UnitHash) -> None:
        """Forget a unit, if it is here."""
        with self._lock:
            slot = self._held.pop(unit_hash, None)
            if slot is not None:
                self._on_change(unit_hash, False)
                self._let_go(slot)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            for unit_hash in list(self._held):
                self.drop(unit_hash)

    def holds(self, unit_hashes: Sequence[UnitHash]) -> list[bool]:
        """Whether each is here."""
        with self._lock:
            return [unit_hash in self._held for unit_hash in unit_hashes]

    def contents(self) -> list[UnitHash]:
        """Least recently used first."""
        with self._lock:
            return list(self._held)

    @property
    def num_units(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        return len(self._held) * self._slot_bytes

    def _touched(self, unit_hash: UnitHash) -> bool:
        if unit_hash not in self._held:
            return False
        self._held.move_to_end(unit_hash)
        return True

    def _take_slot(self) -> int | None:
        while len(self._held) >= self.capacity or not self._has_free_slot:
            if not self._held:
                return None
            unit_hash, slot = self._held.popitem(last=False)
            self._on_change(unit_hash, False)
            self._evict(unit_hash, slot)
        if self._free:
            return self._free.pop()
        self._unused += 1
        return self._unused - 1

    @property
    def _has_free_slot(self) -> bool:
        return bool(self._free) or self._unused < self._num_slots

    def _memory(self, slot: int) -> memoryview:
        return self._arena[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def _evict(self, unit_hash: UnitHash, slot: int) -> None:
        if self._on_evicted is None:
            self._let_go(slot)
        elif self._has_free_slot:  # the newcomer has a slot without this one
            unit = self._lease(slot)
            self._let_go(slot)
            self._on_evicted(unit_hash, unit)
        else:
            self._let_go(slot)
            self._on_evicted(unit_hash, None)

    def _let_go(self, slot: int) -> None:
        """No unit is held in it any more: it is free, or will be when its last reader is done."""
        self._held_slots.remove(slot)
        if self._leases[slot] == 0:
            self._free.append(slot)

    def _lease(self, slot: int) -> StoredUnit:
        self._leases[slot] += 1
        return StoredUnit(self._memory(slot), lambda: self._released(slot))

    def _released(self, slot: int) -> None:
        with self._lock:
            self._leases[slot] -= 1
            if self._leases[slot] == 0:
                del self._leases[slot]
                if slot not in self._held_slots:
                    self._free.append(slot)
