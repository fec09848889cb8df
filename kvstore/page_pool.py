"""Accounting of one worker's KV pages: who holds which, what can be reused. Pure; tensors live on the worker.

A page is in exactly one state:

    free ──allocate──▸ in_use ──release──▸ free        (nothing published in it)
                       in_use ──release──▸ cached      (published units stay findable)
    cached ──acquire──▸ in_use
    cached ──allocate (least recently used first, units withdrawn)──▸ in_use
    in_use ──retire──▸ retiring ──retired──▸ free | cached

Invariant: free + cached + in_use + retiring == num_pages.

A unit is findable here from the plan that computes it on, and *computed* once that is reported: only computed units are
told to others (`take_changes`), pulled or indexed.

    units of a page   | computed | published, its step not reported yet | … |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import dataclass

from wire.errors import KVPoolExhausted
from wire.ids import PageId, UnitHash
from wire.plan import PageUnits


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest resident prefix of a chain of unit hashes.

    `[0, len(full_pages) * page_size)` lies in whole pages that can be shared by reference; the next
    `partial_units` units lie at the start of `partial_page`, which can only be copied.
    """

    full_pages: list[PageId]
    partial_page: PageId | None
    partial_units: int


@dataclass(frozen=True, slots=True)
class PoolCounts:
    free: int
    cached: int
    in_use: int
    retiring: int


class PagePool:
    """Pages [0, num_pages) of `page_size` tokens each; a unit is `unit_tokens` tokens."""

    def __init__(self, num_pages: int, page_size: int, unit_tokens: int) -> None:
        if page_size % unit_tokens:
            raise ValueError(f"page_size {page_size} is not a multiple of unit_tokens {unit_tokens}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.units_per_page = page_size // unit_tokens
        self._free = [PageId(p) for p in range(num_pages - 1, -1, -1)]  # popped from the end: low ids first
        self._cached: OrderedDict[PageId, None] = OrderedDict()  # least recently used first
        self._retiring: set[PageId] = set()
        self._references = [0] * num_pages
        self._units: list[list[UnitHash]] = [[] for _ in range(num_pages)]  # published, by offset in the page
        self._num_computed = [0] * num_pages  # of those, the first so many
        self._computed_in: dict[UnitHash, int] = {}  # computed unit → pages it lies in
        self._changes: dict[UnitHash, bool] = {}
        # A hash lies nearly always in one page. Where several hold it, the others are here: all O(1) to forget.
        self._holder: dict[UnitHash, PageId] = {}
        self._other_holders: dict[UnitHash, dict[PageId, None]] = {}

    @property
    def num_available(self) -> int:
        """Pages that allocate() can hand out now."""
        return len(self._free) + len(self._cached)

    def counts(self) -> PoolCounts:
        """How many pages are in each state. O(1)."""
        free, cached, retiring = len(self._free), len(self._cached), len(self._retiring)
        return PoolCounts(free, cached, self.num_pages - free - cached - retiring, retiring)

    def match(self, hashes: Sequence[UnitHash]) -> PrefixMatch:
        """Longest prefix of a unit chain that is resident here. O(pages touched).

        A page holding a unit holds every earlier unit of that page too, of the same chain: pages fill in order
        and a chain hash fixes all that precedes it. So the last unit of a page stands for the page.
        """
        per_page = self.units_per_page
        full_pages: list[PageId] = []
        for last in range(per_page - 1, len(hashes), per_page):
            holder = self._holder.get(hashes[last])
            if holder is None:
                break
            full_pages.append(holder)
        first = len(full_pages) * per_page
        for units in range(min(per_page - 1, len(hashes) - first), 0, -1):
            holder = self._holder.get(hashes[first + units - 1])
            if holder is not None:
                return PrefixMatch(full_pages, holder, units)
        return PrefixMatch(full_pages, None, 0)

    def is_cached(self, page: PageId) -> bool:
        """Nobody holds it, yet its units can be found: acquiring it takes one from num_available."""
        return page in self._cached

    def acquire(self, page: PageId) -> None:
        """Hold a page that is in use or cached, once more."""
        self._cached.pop(page, None)
        self._references[page] += 1

    def allocate(self, count: int) -> list[PageId]:
        """`count` fresh pages, each with one reference. Raises KVPoolExhausted, taking none, when too few are left."""
        if count > self.num_available:
            raise KVPoolExhausted(f"{count} pages wanted, {self.num_available} of {self.num_pages} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _evict(self) -> PageId:
        page, _ = self._cached.popitem(last=False)
        self._forget_units(page)
        return page

    def release(self, pages: Iterable[PageId]) -> None:
        """Drop one reference from each. Give a sequence's pages tail first: the head is worth keeping longest."""
        for page in pages:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._settle(page)

    def retire(self, page: PageId) -> None:
        """Like release of a last reference, but the page may still be read elsewhere until retired()."""
        self._references[page] -= 1
        if self._references[page] == 0:
            self._retiring.add(page)

    def retired(self, page: PageId) -> None:
        """The reader of a retiring page is done with it."""
        self._retiring.remove(page)
        self._settle(page)

    def _settle(self, page: PageId) -> None:
        if self._units[page]:
            self._cached[page] = None
        else:
            self._free.append(page)

    def publish(self, page: PageId, unit_hash: UnitHash) -> None:
        """Make the page's next unit findable; units of a page are published in order of their offset."""
        self._units[page].append(unit_hash)
        if self._holder.setdefault(unit_hash, page) != page:
            self._other_holders.setdefault(unit_hash, {})[page] = None

    def mark_computed(self, page: PageId, unit_hash: UnitHash) -> None:
        """The step that computes a published unit was reported. Of no effect where the page has gone to others since,
        or an earlier unit of it was not computed."""
        units, computed = self._units[page], self._num_computed[page]
        if computed < len(units) and units[computed] == unit_hash:
            self._num_computed[page] = computed + 1
            count = self._computed_in.get(unit_hash, 0)
            self._computed_in[unit_hash] = count + 1
            if not count:
                self._changes[unit_hash] = True

    def computed_units(self) -> KeysView[UnitHash]:
        """Every computed unit, once."""
        return self._computed_in.keys()

    def take_changes(self) -> dict[UnitHash, bool]:
        """Computed units that came (True) or went since the last call, by their state now."""
        changes, self._changes = self._changes, {}
        return changes

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def withdraw(self, page: PageId) -> None:
        """Make what the page holds unfindable; whoever uses it goes on using it."""
        self._forget_units(page)
        if page in self._cached:
            del self._cached[page]
            self._free.append(page)

    def pages_with(self, unit_hash: UnitHash) -> list[PageId]:
        """Every page in which a unit can be found."""
        holder = self._holder.get(unit_hash)
        return [] if holder is None else [holder, *self._other_holders.get(unit_hash, ())]

    def is_free(self, page: PageId) -> bool:
        """Nobody holds it, and nothing can be found in it."""
        return not self._references[page] and page not in self._retiring and page not in self._cached

    def _forget_units(self, page: PageId) -> None:
        for unit_hash in self._units[page][: self._num_computed[page]]:
            self._computed_in[unit_hash] -= 1
            if not self._computed_in[unit_hash]:
                del self._computed_in[unit_hash]
                self._changes[unit_hash] = False
        self._num_computed[page] = 0
        for unit_hash in self._units[page]:
            others = self._other_holders.get(unit_hash)
            if self._holder[unit_hash] != page:
                assert others is not None  # publish() put it there
                del others[page]
            elif others:
                self._holder[unit_hash] = next(iter(others))
                del others[self._holder[unit_hash]]
            else:
                del self._holder[unit_hash]
            if others is not None and not others:
                del self._other_holders[unit_hash]
        self._units[page].clear()

    def adopt(self, residents: Iterable[PageUnits]) -> None:
        """Take over what a worker still holds from an earlier session: those pages become cached. Fresh pools only."""
        by_page = {r.page_id: r.unit_hashes for r in residents if r.unit_hashes}
        self._free = [page for page in self._free if page not in by_page]
        for page, hashes in by_page.items():
            for unit_hash in hashes:
                self.publish(page, unit_hash)
                self.mark_computed(page, unit_hash)
            self._cached[page] = None
