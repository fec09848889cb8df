"""Slots: who may use them when."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from gpu_worker.tiers.host_store import HostStore
from gpu_worker.tiers.port import StoredUnit, shares
from tests.tiers.units import a_hash, hashes
from wire.ids import UnitHash

SLOT = 8


def put(store: HostStore, number: int) -> bool:
    def fill(slot: memoryview) -> None:
        slot[:] = number.to_bytes(SLOT, "little")

    return store.put(a_hash(number), fill)


def value(unit: StoredUnit | None) -> int:
    assert unit is not None
    return int.from_bytes(unit.encoded, "little")


class Below:
    """Takes what the host evicts, as the stores below it do."""

    def __init__(self) -> None:
        self.taken: list[tuple[UnitHash, StoredUnit]] = []
        self.lost: list[UnitHash] = []

    def __call__(self, unit_hash: UnitHash, unit: StoredUnit | None) -> None:
        if unit is None:
            self.lost.append(unit_hash)
        else:
            self.taken.append((unit_hash, unit))


def a_store(num_slots: int, *, spare_slots: int = 0, below: Below | None = None) -> HostStore:
    return HostStore(memoryview(bytearray(SLOT * num_slots)), SLOT, spare_slots=spare_slots, on_evicted=below)


def test_a_chains_tail_goes_before_its_head() -> None:
    store = a_store(4)
    for number in (3, 2, 1, 0):
        put(store, number)
    store.touch(hashes(3))
    put(store, 9)
    assert store.holds(hashes(4)) == [True, True, True, False]
    put(store, 8)
    put(store, 7)
    assert store.holds(hashes(4)) == [True, False, False, False]


def test_a_unit_that_is_read_keeps_its_slot() -> None:
    store = a_store(2)
    put(store, 0)
    put(store, 1)
    unit = store.get(a_hash(0))
    put(store, 2)  # evicts 0, which still lies there, and so 1 too
    assert value(unit) == 0
    assert store.contents() == [a_hash(2)]
    put(store, 3)
    assert value(unit) == 0
    assert unit is not None
    unit.release()
    unit.release()
    put(store, 4)
    assert store.contents() == [a_hash(3), a_hash(4)]


def test_a_put_that_finds_every_slot_read_is_refused() -> None:
    store = a_store(1)
    put(store, 0)
    with store.get(a_hash(0)) or pytest.fail("it is there"):
        assert not put(store, 1)
    assert put(store, 1)


def test_what_is_evicted_is_given_on_where_it_lies_until_no_slot_is_to_spare() -> None:
    below = Below()
    store = a_store(4, spare_slots=2, below=below)
    assert store.capacity == 2
    for number in range(6):
        put(store, number)
    assert store.contents() == hashes(2, 4)
    assert [(unit_hash, value(unit)) for unit_hash, unit in below.taken] == [(a_hash(0), 0), (a_hash(1), 1)]
    assert below.lost == hashes(2, 2)
    below.taken[0][1].release()
    put(store, 6)
    assert [unit_hash for unit_hash, _ in below.taken] == [*hashes(2), a_hash(4)]
    assert value(below.taken[1][1]) == 1


def test_a_unit_given_to_two_is_released_by_the_second() -> None:
    released = []
    one, two = shares(StoredUnit(memoryview(b"x"), lambda: released.append(1)), 2)
    one.release()
    one.release()
    assert released == []
    two.release()
    assert released == [1]


def test_a_fill_that_raises_costs_no_slot() -> None:
    def fail(slot: memoryview) -> None:
        raise RuntimeError("device lost")

    store = a_store(1)
    for _ in range(3):
        with pytest.raises(RuntimeError):
            store.put(a_hash(0), fail)
    assert store.num_units == 0
    assert put(store, 1)


def test_an_arena_without_a_slot_to_use_is_refused() -> None:
    with pytest.raises(ValueError, match="2 slots, 2 of them to spare"):
        a_store(2, spare_slots=2)


class HostMachine(RuleBasedStateMachine):
    """Random puts, reads and releases: what was read stays as it was, no slot is lost, the twin is exact."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.below = Below()
        self.twin: list[UnitHash] = []
        self.store = HostStore(
            memoryview(bytearray(SLOT * 6)), SLOT, spare_slots=2, on_change=self.changed, on_evicted=self.below
        )
        self.read: list[tuple[int, StoredUnit]] = []

    def changed(self, unit_hash: UnitHash, is_here: bool) -> None:
        (self.twin.append if is_here else self.twin.remove)(unit_hash)

    @rule(number=st.integers(0, 12))
    def put(self, number: int) -> None:
        put(self.store, number)

    @rule(number=st.integers(0, 12), target=leases)
    def get(self, number: int) -> tuple[int, StoredUnit] | None:
        unit = self.store.get(a_hash(number))
        if unit is None:
            return None
        self.read.append((number, unit))
        return number, unit

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[int, StoredUnit] | None) -> None:
        if lease is not None:
            self.read.remove(lease)
            lease[1].release()

    @rule()
    def write_below(self) -> None:
        if self.below.taken:
            self.below.taken.pop(0)[1].release()

    @rule(number=st.integers(0, 12))
    def drop(self, number: int) -> None:
        self.store.drop(a_hash(number))

    @rule(count=st.integers(1, 12))
    def touch(self, count: int) -> None:
        self.store.touch(hashes(count))

    @invariant()
    def what_is_read_stays(self) -> None:
        for number, unit in self.read:
            assert value(unit) == number
        for unit_hash, unit in self.below.taken:
            assert a_hash(value(unit)) == unit_hash

    @invariant()
    def the_twin_is_exact(self) -> None:
        assert set(self.twin) == set(self.store.contents())
        assert self.store.num_units <= self.store.capacity

    def teardown(self) -> None:
        for unit in [unit for _, unit in self.read + [(0, unit) for _, unit in self.below.taken]]:
            unit.release()
        self.below.taken.clear()
        for number in range(100, 106):
            assert put(self.store, number)
        assert self.store.num_units == self.store.capacity


TestHostMachine = HostMachine.TestCase
