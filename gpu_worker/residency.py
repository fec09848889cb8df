"""Which hash units lie in which KV page of this worker, and since when a page has its owner. Pure but for a lock.

page     | unit 0 | unit 1 | being written … |        hashes known: [h0, h1], always a prefix of the page

A page's generation counts its owners. It is counted up before a new owner may write, and a published unit is never
rewritten by the same one, so bytes that were read from a page are those of its units if its generation is the same
after the read as when the units were found (a seqlock, but for readers that copy first and ask afterwards).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from gpu_worker.transfer.port import Generations, UnitPlace
from wire.ids import UNIT_TOKENS, PageId, UnitHash
from wire.plan import PageCopy, PageUnits


@dataclass(slots=True)
class Found:
    """Leading units of a chain, and the generations of their pages when they were found."""

    places: list[UnitPlace] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class Residency:
    """Page → hashes of its computed units, and back. A page outlives its sequence: only a new owner voids it.

    Every method may be called from any thread; those that change what a page holds, by its owner only: the compute
    thread, or a pull into it.
    """

    def __init__(
        self,
        page_size: int,
        num_pages: int,
        *,
        generations: Generations | None = None,
        on_void: Callable[[list[PageUnits]], None] | None = None,
    ) -> None:
        """generations: one for each page, e.g. in shared memory. on_void: told of pages with units, by the thread that
        voids them and before it does."""
        self._page_size = page_size
        self._generations: Generations = [0] * num_pages if generations is None else generations
        self._on_void = on_void
        self._lock = threading.Lock()
        self._units: dict[PageId, list[UnitHash]] = {}
        self._places: dict[UnitHash, tuple[UnitPlace, ...]] = {}

    def __len__(self) -> int:
        """Pages that hold at least one unit."""
        return len(self._units)

    def void(self, pages: Iterable[PageId]) -> list[int]:
        """These pages get a new owner, who may write once this returns: what they held is forgotten.

        Returns their generations under the new owner.
        """
        pages = list(pages)
        if self._on_void is not None:
            with self._lock:
                held = [PageUnits(page, list(self._units[page])) for page in pages if page in self._units]
            if held:
                self._on_void(held)
        with self._lock:
            for page in pages:
                self._generations[page] += 1
                self._place(page, [])
            return [int(self._generations[page]) for page in pages]

    def granted(self, pages: Sequence[PageId], first_index: int, unit_hashes: Sequence[UnitHash], start: int) -> None:
        """A sequence got pages for its block table from first_index on; its positions [0, start) are computed.

        [0, start) may lie in pages others share | the page `start` falls into, and all behind it, are its own
        """
        kept: dict[PageId, list[UnitHash]] = {}
        with self._lock:
            for index, page in enumerate(pages, first_index):
                first = index * self._page_size
                if first + self._page_size <= start:
                    continue
                ours = self._chain_part(index, unit_hashes[: start // UNIT_TOKENS])
                held = self._units.get(page, [])
                if not ours or held != ours:  # else just copied or pulled for this very sequence, and nothing else
                    kept[page] = ours if held[: len(ours)] == ours else []
        if kept:
            self.void(kept)
            with self._lock:
                for page, ours in kept.items():
                    self._place(page, ours)

    def copied(self, copies: Iterable[PageCopy]) -> None:
        """The targets, voided before, hold the source's whole units among the copied slots."""
        with self._lock:
            for copy in copies:
                source = self._units.get(copy.source_page, [])
                self._place(copy.target_page, source[: copy.num_slots // UNIT_TOKENS])

    def pulled(self, pages: Sequence[PageId], generations: Sequence[int], unit_hashes: Sequence[UnitHash]) -> None:
        """Pages hold these units from the first slot of the first page on, but for pages that were voided again since
        `void` gave their generations: a cancelled pull's, whose end came late."""
        with self._lock:
            for index, (page, generation) in enumerate(zip(pages, generations, strict=True)):
                if self._generations[page] == generation:
                    self._place(page, self._chain_part(index, unit_hashes))

    def written(self, block_table: Sequence[PageId], unit_hashes: Sequence[UnitHash], start: int, end: int) -> None:
        """A sequence wrote positions [start, end) of pages it owns; unit_hashes are all its full units in [0, end)."""
        with self._lock:
            for index in range(start // self._page_size, -(-end // self._page_size)):
                self._place(block_table[index], self._chain_part(index, unit_hashes))

    def clear(self) -> None:
        """Void every page, told to nobody: what they hold is not to be trusted."""
        with self._lock:
            for page in range(len(self._generations)):
                self._generations[page] += 1
            self._units.clear()
            self._places.clear()

    def find(self, unit_hashes: Sequence[UnitHash]) -> Found:
        """The leading units that are resident."""
        found = Found()
        with self._lock:
            for unit_hash in unit_hashes:
                places = self._places.get(unit_hash)
                if places is None:
                    break
                found.places.append(places[0])
                found.generations.append(int(self._generations[places[0].page_id]))
        return found

    def places(self, unit_hash: UnitHash) -> tuple[UnitPlace, ...]:
        """Everywhere a unit is resident."""
        with self._lock:
            return self._places.get(unit_hash, ())

    def still(self, found: Found) -> bool:
        """None of these pages got a new owner since: bytes read from them before this call are those of the units."""
        with self._lock:
            num_pages = len(self._generations)
            return len(found.places) == len(found.generations) and all(
                place.page_id < num_pages and self._generations[place.page_id] == generation
                for place, generation in zip(found.places, found.generations, strict=True)
            )

    def pages(self) -> list[PageUnits]:
        """Everything resident, by page."""
        with self._lock:
            return [PageUnits(page, list(self._units[page])) for page in sorted(self._units)]

    def _chain_part(self, index: int, unit_hashes: Sequence[UnitHash]) -> list[UnitHash]:
        """Those of a chain's units that lie in the index-th page of its block table."""
        units_per_page = self._page_size // UNIT_TOKENS
        return list(unit_hashes[index * units_per_page : (index + 1) * units_per_page])

    def _place(self, page: PageId, hashes: list[UnitHash]) -> None:
        held = self._units.get(page, [])
        if held == hashes:
            return
        common = len(held) if hashes[: len(held)] == held else 0
        for unit_hash in held[common:]:
            left = tuple(place for place in self._places[unit_hash] if place.page_id != page)
            if left:
                self._places[unit_hash] = left
            else:
                del self._places[unit_hash]
        for index, unit_hash in enumerate(hashes[common:], common):
            self._places[unit_hash] = (*self._places.get(unit_hash, ()), UnitPlace(page, index))
        if hashes:
            self._units[page] = hashes
        else:
            self._units.pop(page, None)
