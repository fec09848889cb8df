"""Which hash units lie in which KV page of this worker: what Residents announces after a broken session. Pure.

page     | unit 0 | unit 1 | being written … |        hashes known: [h0, h1], always a prefix of the page
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from wire.ids import UNIT_TOKENS, PageId, UnitHash
from wire.plan import PageCopy, PageUnits


class Residency:
    """Page → hashes of its computed units. The page outlives its sequence: only a new writer or a copy voids it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._units: dict[PageId, list[UnitHash]] = {}

    def __len__(self) -> int:
        """Pages that hold at least one unit."""
        return len(self._units)

    def copied(self, copies: Iterable[PageCopy]) -> None:
        """A copy replaces what its target held by the source's whole units among the copied slots."""
        for copy in copies:
            source = self._units.get(copy.source_page, [])
            self._place(copy.target_page, source[: copy.num_slots // UNIT_TOKENS])

    def written(self, block_table: Sequence[PageId], unit_hashes: Sequence[UnitHash], start: int, end: int) -> None:
        """A sequence wrote positions [start, end); unit_hashes are those of all its full units in [0, end).

        Each page it touched now holds that sequence's units and nothing else: a page has one writer.
        """
        units_per_page = self._page_size // UNIT_TOKENS
        for index in range(start // self._page_size, -(-end // self._page_size)):
            first = index * units_per_page
            self._place(block_table[index], unit_hashes[first : first + units_per_page])

    def clear(self) -> None:
        self._units.clear()

    def pages(self) -> list[PageUnits]:
        """Everything resident, by page."""
        return [PageUnits(page, list(self._units[page])) for page in sorted(self._units)]

    def _place(self, page: PageId, hashes: Sequence[UnitHash]) -> None:
        if hashes:
            self._units[page] = list(hashes)
        else:
            self._units.pop(page, None)
