"""The page pool under any order of calls: pages are never lost, doubled, or matched to the wrong content."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.page_pool import PagePool
from kvstore.prefix_hash import chain, root_hash
from wire.errors import KVPoolExhausted
from wire.ids import UNIT_TOKENS, PageId, UnitHash
from wire.plan import PageUnits

CHAINS = [chain(root_hash("m", str(salt)), list(range(160))) for salt in range(3)]


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 12), units_per_page=st.sampled_from([1, 2, 4]))
    def start(self, num_pages: int, units_per_page: int) -> None:
        self.pool = PagePool(num_pages, units_per_page * UNIT_TOKENS, UNIT_TOKENS)
        self.per_page = units_per_page
        self.held: list[PageId] = []  # one entry per reference
        self.retiring: set[PageId] = set()
        self.content: dict[PageId, list[UnitHash]] = {}
        self.num_computed: Counter[PageId] = Counter()  # of content, the first so many
        self.told: set[UnitHash] = set()  # by take_changes

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        available = self.pool.num_available
        if count > available:
            with pytest.raises(KVPoolExhausted):
                self.pool.allocate(count)
            assert self.pool.num_available == available
            return
        pages = self.pool.allocate(count)
        assert len(set(pages)) == count
        assert not set(pages) & (set(self.held) | self.retiring), "handed out twice"
        for page in pages:
            self.content[page] = []
            self.num_computed[page] = 0
        self.held += pages

    @precondition(lambda self: self.held)
    @rule(data=st.data(), which=st.integers(0, 2))
    def publish_next_unit(self, data: st.DataObject, which: int) -> None:
        page = data.draw(st.sampled_from(self.held))
        units = self.content[page]
        if len(units) < self.per_page and (not units or units[0] in CHAINS[which]):
            start = CHAINS[which].index(units[0]) if units else data.draw(st.integers(0, 1)) * self.per_page
            unit_hash = CHAINS[which][start + len(units)]
            self.pool.publish(page, unit_hash)
            units.append(unit_hash)

    @precondition(lambda self: any(self.content.values()))
    @rule(data=st.data(), late=st.booleans())
    def a_unit_is_computed(self, data: st.DataObject, late: bool) -> None:
        """In order within a page; a report that comes late, or twice, names what is there no longer or already."""
        page = data.draw(st.sampled_from([page for page, units in self.content.items() if units]))
        units, done = self.content[page], self.num_computed[page]
        if late:
            unit_hash = data.draw(st.sampled_from([unit for chain in CHAINS for unit in chain]))
            if unit_hash == next(iter(units[done : done + 1]), None):
                return
            self.pool.mark_computed(page, unit_hash)
        elif done < len(units):
            self.pool.mark_computed(page, units[done])
            self.num_computed[page] += 1

    @rule(which=st.integers(0, 2), length=st.integers(0, 10))
    def match_and_acquire(self, which: int, length: int) -> None:
        wanted = CHAINS[which][:length]
        found = self.pool.match(wanted)
        for index, page in enumerate(found.full_pages):
            assert self.content[page] == wanted[index * self.per_page : (index + 1) * self.per_page]
        first = len(found.full_pages) * self.per_page
        if found.partial_page is not None:
            assert 0 < found.partial_units < self.per_page
            head = self.content[found.partial_page][: found.partial_units]
            assert head == wanted[first : first + found.partial_units]
        elif first < len(wanted):
            assert not any(wanted[first] in units for units in self.content.values()), "missed a resident unit"
        for page in found.full_pages:
            if page not in self.retiring:
                self.pool.acquire(page)
                self.held.append(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.release([page])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        """The last holder lets go while a reader elsewhere is not done."""
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.retire(page)
        if page not in self.held:
            self.retiring.add(page)

    @precondition(lambda self: self.retiring)
    @rule(data=st.data())
    def reader_is_done(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.retiring)))
        self.retiring.remove(page)
        self.pool.retired(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.pool.withdraw(page)
        self.content[page] = []
        self.num_computed[page] = 0

    @invariant()
    def every_page_is_in_one_state(self) -> None:
        if not hasattr(self, "pool"):
            return
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.in_use + counts.retiring == self.pool.num_pages
        assert counts.in_use == len(set(self.held))
        assert counts.retiring == len(self.retiring)
        for page in list(self.content):
            evicted = page not in self.held and page not in self.retiring and not self.pool.is_cached(page)
            if evicted:
                del self.content[page]

    @invariant()
    def what_is_computed_is_told_once_and_what_is_gone_as_well(self) -> None:
        if not hasattr(self, "pool"):
            return
        computed = {unit for page, units in self.content.items() for unit in units[: self.num_computed[page]]}
        for unit_hash, is_there in self.pool.take_changes().items():
            (self.told.add if is_there else self.told.discard)(unit_hash)
        assert self.told == set(self.pool.computed_units()) == computed
        assert not self.pool.has_changes and self.pool.take_changes() == {}
        assert all((chain[0] in self.pool.computed_units()) == (chain[0] in computed) for chain in CHAINS)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    pool = PagePool(4, 16, UNIT_TOKENS)
    pages = pool.allocate(3)
    for page, unit_hash in zip(pages, CHAINS[0], strict=False):
        pool.publish(page, unit_hash)
    pool.release(reversed(pages))
    pool.allocate(2)
    assert pool.match(CHAINS[0][:3]).full_pages == pages[:2]


def test_a_retiring_page_is_neither_free_nor_cached_until_its_reader_is_done() -> None:
    pool = PagePool(2, 16, UNIT_TOKENS)
    (page,) = pool.allocate(1)
    pool.publish(page, CHAINS[0][0])
    pool.retire(page)
    assert pool.num_available == 1 and pool.counts().retiring == 1
    pool.retired(page)
    assert pool.is_cached(page) and pool.num_available == 2


def test_a_fresh_pool_adopts_what_a_worker_still_holds() -> None:
    pool = PagePool(4, 32, UNIT_TOKENS)
    pool.adopt([PageUnits(PageId(2), CHAINS[0][:2]), PageUnits(PageId(3), CHAINS[0][2:3]), PageUnits(PageId(0), [])])
    found = pool.match(CHAINS[0][:5])
    assert found.full_pages == [2] and found.partial_page == 3 and found.partial_units == 1
    assert pool.counts().cached == 2 and pool.counts().free == 2


def test_a_page_size_that_splits_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        PagePool(4, 24, UNIT_TOKENS)


def test_a_published_unit_is_told_once_its_step_is_reported() -> None:
    pool = PagePool(4, 32, UNIT_TOKENS)
    (page,) = pool.allocate(1)
    pool.publish(page, CHAINS[0][0])
    assert pool.match(CHAINS[0][:1]).partial_page == page
    assert CHAINS[0][0] not in pool.computed_units() and not pool.has_changes
    pool.mark_computed(page, CHAINS[0][0])
    assert pool.take_changes() == {CHAINS[0][0]: True}


def test_a_unit_that_lies_in_two_pages_goes_with_the_last_one() -> None:
    pool = PagePool(4, 16, UNIT_TOKENS)
    first, second = pool.allocate(2)
    for page in (first, second):
        pool.publish(page, CHAINS[0][0])
        pool.mark_computed(page, CHAINS[0][0])
    assert pool.take_changes() == {CHAINS[0][0]: True}
    pool.withdraw(first)
    assert CHAINS[0][0] in pool.computed_units() and not pool.has_changes
    pool.withdraw(second)
    assert pool.take_changes() == {CHAINS[0][0]: False}


def test_a_report_for_a_page_that_has_gone_to_others_changes_nothing() -> None:
    pool = PagePool(1, 16, UNIT_TOKENS)
    (page,) = pool.allocate(1)
    pool.publish(page, CHAINS[0][0])
    pool.release([page])
    pool.allocate(1)
    pool.publish(page, CHAINS[1][0])
    pool.mark_computed(page, CHAINS[0][0])
    assert not pool.has_changes and list(pool.computed_units()) == []


def test_a_unit_after_one_that_was_not_computed_is_not_told() -> None:
    pool = PagePool(1, 32, UNIT_TOKENS)
    (page,) = pool.allocate(1)
    for unit_hash in CHAINS[0][:2]:
        pool.publish(page, unit_hash)
    pool.mark_computed(page, CHAINS[0][1])
    assert not pool.has_changes
