"""The twin of the prefix index says what a naive model says, through every order of changes and ends of workers."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore import mask_table
from kvstore.prefix_twin import MAX_SWEEP_UNITS, STRETCH_UNITS, PrefixTwin, TierPrefix
from wire.ids import UnitHash, WorkerId
from wire.plan import LOWER_TIERS, Tier

UNITS = [UnitHash(bytes([i]) * 32) for i in range(12)]
WORKERS = [WorkerId(f"w{i}") for i in range(5)]
CHAIN_UNITS = 2 * STRETCH_UNITS + 100
"""Of a chain that is looked up in three stretches."""

workers = st.sampled_from(WORKERS)
units = st.sampled_from(UNITS)
tiers = st.sampled_from(Tier)
lengths = st.integers(0, STRETCH_UNITS)


class NaiveIndex:
    """Nested sets, looked up worker by worker."""

    def __init__(self) -> None:
        self.held: dict[WorkerId, dict[Tier, set[UnitHash]]] = defaultdict(lambda: {tier: set() for tier in Tier})

    def lookup(self, chain: list[UnitHash]) -> dict[WorkerId, TierPrefix]:
        found = {}
        for worker_id, held in self.held.items():
            device = self.leading(chain, held[Tier.DEVICE])
            host = self.leading(chain, held[Tier.DEVICE] | held[Tier.HOST])
            any_tier = self.leading(chain, set().union(*held.values()))
            if any_tier:
                found[worker_id] = TierPrefix(device, host, any_tier)
        return found

    @staticmethod
    def leading(chain: list[UnitHash], held: set[UnitHash]) -> int:
        length = 0
        while length < len(chain) and chain[length] in held:
            length += 1
        return length


class TwinMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.twin = PrefixTwin()
        self.naive = NaiveIndex()

    @rule(worker_id=workers, unit_hash=units, tier=tiers)
    def add(self, worker_id: WorkerId, unit_hash: UnitHash, tier: Tier) -> None:
        self.twin.add(worker_id, [unit_hash], tier)
        self.naive.held[worker_id][tier].add(unit_hash)

    @rule(worker_id=workers, length=st.integers(1, len(UNITS)), tier=tiers)
    def add_prefix(self, worker_id: WorkerId, length: int, tier: Tier) -> None:
        for unit_hash in UNITS[:length]:
            self.add(worker_id, unit_hash, tier)

    @rule(worker_id=workers, unit_hash=units, tier=tiers)
    def remove(self, worker_id: WorkerId, unit_hash: UnitHash, tier: Tier) -> None:
        self.twin.remove(worker_id, [unit_hash], tier)
        self.naive.held[worker_id][tier].discard(unit_hash)

    @rule(worker_id=workers)
    def drop_worker(self, worker_id: WorkerId) -> None:
        self.twin.drop_worker(worker_id)
        self.naive.held.pop(worker_id, None)

    @rule(chain=st.lists(units, max_size=len(UNITS)))
    def lookup_any_chain(self, chain: list[UnitHash]) -> None:
        assert self.twin.lookup(chain) == self.naive.lookup(chain)

    @invariant()
    def says_what_the_model_says(self) -> None:
        assert self.twin.lookup(UNITS) == self.naive.lookup(UNITS)
        for worker_id in WORKERS:
            held = self.naive.held.get(worker_id, {tier: set() for tier in Tier})
            assert self.twin.units(worker_id) == held
            for unit_hash in UNITS:
                assert self.twin.tiers(worker_id, unit_hash) == tuple(t for t in Tier if unit_hash in held[t])
            assert set(self.twin.hashes(worker_id)) == set().union(*held.values())
            assert self.twin.count(worker_id) == len(set().union(*held.values()))


class TableMachine(TwinMachine):
    """Every lookup goes to the table, which is up to date, or a few changes behind."""

    @initialize(batch_units=st.integers(1, 20))
    def begin(self, batch_units: int) -> None:
        self.twin = PrefixTwin(few_units=0, batch_units=batch_units)


TestTwin = TwinMachine.TestCase
TestTable = TableMachine.TestCase
TestTwin.settings = TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_prefix_ends_at_the_first_unit_that_is_in_no_tier() -> None:
    twin = PrefixTwin()
    twin.add(WORKERS[0], UNITS[:4], Tier.DEVICE)
    twin.add(WORKERS[0], UNITS[3:6], Tier.HOST)
    twin.add(WORKERS[0], [UNITS[7]], Tier.DEVICE)
    twin.add(WORKERS[1], [UNITS[0]], Tier.DISK)
    twin.add(WORKERS[2], [UNITS[1]], Tier.DEVICE)
    assert twin.lookup(UNITS) == {WORKERS[0]: TierPrefix(4, 6, 6), WORKERS[1]: TierPrefix(0, 0, 1)}


def test_a_unit_stays_findable_until_it_left_every_tier() -> None:
    twin = PrefixTwin()
    for tier in Tier:
        twin.add(WORKERS[0], UNITS[:1], tier)
    twin.remove(WORKERS[0], UNITS[:1], Tier.DEVICE)
    for tier in LOWER_TIERS:
        assert twin.lookup(UNITS[:1]) == {WORKERS[0]: TierPrefix(0, int(tier is Tier.HOST), 1)}
        twin.remove(WORKERS[0], UNITS[:1], tier)
    assert twin.lookup(UNITS[:1]) == {}


@given(generations=st.integers(1, 6), num_units=st.integers(0, 200))
@settings(deadline=None)
def test_a_worker_that_comes_back_again_and_again_leaves_nothing_behind(generations: int, num_units: int) -> None:
    twin = PrefixTwin()
    hashes = [UnitHash(i.to_bytes(32, "little")) for i in range(num_units)]
    for _ in range(generations):
        twin.add(WORKERS[0], hashes, Tier.DEVICE)
        twin.drop_worker(WORKERS[0])
        assert twin.lookup(hashes) == {}
    twin.add(WORKERS[1], UNITS[:1], Tier.DEVICE)
    for _ in range(num_units + generations):  # each change sweeps
        twin.add(WORKERS[1], UNITS[:1], Tier.DEVICE)
        twin.remove(WORKERS[1], UNITS[:1], Tier.DEVICE)
    twin._settle()
    assert len(twin._masks) == 0 and twin._num_slots <= 2


def test_a_worker_that_comes_back_with_all_it_holds_does_not_clear_its_whole_old_life_at_once() -> None:
    num_units = 5 * MAX_SWEEP_UNITS // 2
    twin = PrefixTwin()
    hashes = [UnitHash(i.to_bytes(32, "little")) for i in range(num_units)]
    others = [UnitHash(i.to_bytes(32, "big")) for i in range(1, num_units)]
    twin.add(WORKERS[0], hashes, Tier.DEVICE)
    twin.drop_worker(WORKERS[0])
    twin.add(WORKERS[0], others, Tier.DEVICE)
    assert [len(ended.tiers) for ended in twin._ended] == [num_units - MAX_SWEEP_UNITS]
    assert twin.lookup(hashes) == {} and twin.lookup(others) == {WORKERS[0]: TierPrefix(*3 * [len(others)])}
    for i in range(num_units):
        twin.add(WORKERS[1], hashes[i : i + 1], Tier.DEVICE)
    twin._settle()
    assert not twin._ended and len(twin._masks) == len({*hashes, *others})
    twin.add(WORKERS[2], UNITS[:1], Tier.DEVICE)
    assert twin._num_slots == 3, "its slot was given out again"


def test_a_worker_that_comes_back_again_and_again_without_other_changes_leaves_a_bounded_rest() -> None:
    hashes = [UnitHash(i.to_bytes(32, "little")) for i in range(2 * MAX_SWEEP_UNITS)]
    twin = PrefixTwin()
    for _ in range(12):
        twin.add(WORKERS[0], hashes, Tier.DEVICE)
        twin.drop_worker(WORKERS[0])
        assert len(twin._ended) <= 4


def test_what_did_not_get_into_the_table_for_want_of_memory_gets_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(memory: object, num_bytes: int) -> None:
        raise OSError("no memory")

    twin = PrefixTwin(few_units=0)
    hashes = [UnitHash(i.to_bytes(32, "little")) for i in range(6000)]
    with monkeypatch.context() as patched:
        patched.setattr(mask_table, "_resized", fails)
        with pytest.raises(OSError, match="no memory"):
            twin.add(WORKERS[0], hashes, Tier.DEVICE)
    assert twin.lookup(hashes) == {}
    twin.add(WORKERS[0], hashes, Tier.DEVICE)
    assert twin.lookup(hashes) == {WORKERS[0]: TierPrefix(6000, 6000, 6000)}


@given(prefixes=st.lists(st.tuples(lengths, lengths, lengths), min_size=1, max_size=20), data=st.data())
@settings(deadline=None)
def test_a_long_chain_is_cut_where_each_worker_s_prefix_ends(
    prefixes: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """(units on the device, then on the host, then on disk) of each worker; the chain is longer than any stretch."""
    chain = [UnitHash(i.to_bytes(32, "little")) for i in range(CHAIN_UNITS)]
    twin = PrefixTwin()
    expected = {}
    for i, lengths_of_worker in enumerate(prefixes):
        ends = [min(CHAIN_UNITS, end) for end in accumulate(lengths_of_worker)]
        for begin, end, tier in zip([0, *ends], ends, (Tier.DEVICE, Tier.HOST, Tier.DISK), strict=False):
            twin.add(WorkerId(f"w{i}"), chain[begin:end], tier)
        expected[WorkerId(f"w{i}")] = ends
    asked = data.draw(st.integers(0, CHAIN_UNITS))
    assert twin.lookup(chain[:asked]) == {
        worker_id: TierPrefix(*(min(asked, end) for end in ends))
        for worker_id, ends in expected.items()
        if min(asked, ends[2])
    }
