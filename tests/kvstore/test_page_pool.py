"""The page pool under any order of calls: pages are never lost, doubled, or matched to the wrong content."""

from __future__ import annotations

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
