"""A hash table from units to bit masks, whose lookups wait for memory a few times in all, not for each unit. Pure.

A chain of 512 units in a dict of a million is 512 cache misses, several for each unit, one after the other. Here the
places of all of a chain's units are computed at once and read by one gather, whose misses overlap. Changes come in
batches for the same reason.

    bucket   | tag | tag | … 8 cells, 32 bytes |        tag: 4 bytes of the unit's hash; 0: an empty cell
    row_of   | row | row | …                   |
    hashes   row ─▸ all 32 bytes                        what was found by its tag is compared whole: tags may be equal
    masks    row ─▸ 64 bits                             one array for each 64 bits

A unit that finds its bucket full, one or two in a hundred, has its row in a dict, `overflow`. Nothing is ever probed
for, so a removed unit leaves nothing behind. The table grows by linear hashing (Litwin, VLDB 1980), SPLIT_BUCKETS at a
time, and its memory where it lies: to copy a million units at once would hold up the event loop. It does not shrink.
"""

from __future__ import annotations

import mmap
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from functools import reduce
from typing import Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from wire.ids import UnitHash

_CELL_BITS: Final = 3
CELLS: Final = 1 << _CELL_BITS
"""Of a bucket."""
MAX_UNITS_PER_BUCKET: Final = 3
"""On average. Buckets not split yet hold up to twice that: with more, many would overflow."""
SPLIT_BUCKETS: Final = 512
"""Split at once; also the buckets of an empty table. A power of two."""
OVERFLOW_SHARE: Final = 32
"""When more than one unit in so many overflowed, a split tries some of them again:"""
RETRIES: Final = 64
HASH_BYTES: Final = 32
HUGE_BYTES: Final = 1 << 23
"""From this size on, memory is asked for in huge pages: a lookup then waits for fewer page tables."""

_WORDS: Final = HASH_BYTES // 8
_TAG_BYTES: Final = 4
_LINE_BYTES: Final = CELLS * _TAG_BYTES
_ALL_WORDS: Final = np.uint32(0x01010101)  # four bools that are true

Masks = NDArray[np.uint64]
_Hashes = NDArray[np.uint64]  # [units, _WORDS]
_Places = NDArray[np.intp]


class MaskTable:
    """Unit → `num_columns` masks of 64 bits; a unit whose masks are all 0 is not in it.

    Any 32 bytes may be a unit's hash; the costs are those of hashes that are spread evenly. Row 0 is nobody's: all 0.
    """

    def __init__(self) -> None:
        self._num_rows = 1
        self._free_rows = array("I")
        self._overflow: OrderedDict[UnitHash, int] = OrderedDict()
        self._tags = _Memory("<u4", CELLS)
        self._row_of = _Memory("<u4", CELLS)
        self._hashes = _Memory("<u8", _WORDS)
        self._masks: list[_Memory] = []
        self._fit(SPLIT_BUCKETS)

    def __len__(self) -> int:
        """Units."""
        return self._num_rows - 1 - len(self._free_rows)

    @property
    def num_columns(self) -> int:
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Of memory touched, the overflow's apart: it is mapped in powers of two."""
        row_bytes = HASH_BYTES + 8 * self.num_columns
        return row_bytes * self._num_rows + 2 * _LINE_BYTES * self._num_buckets

    def add_column(self) -> None:
        """64 bits more for every unit. Raises OSError when there is no memory: then there is none more."""
        masks = _Memory("<u8")
        masks.fit(_rows_of(self._num_buckets))
        self._masks.append(masks)

    def get(self, chain: Sequence[UnitHash]) -> list[Masks]:
        """Each column's masks of the chain's units: [len(chain)]; 0 from the first that is not here on."""
        hashes = _hashes(chain)
        first = self._find_one(chain[0])
        rows = np.zeros(len(chain), np.intp)
        if first:
            end = self._run_length(first, hashes)
            rows[:end] = np.arange(first, first + end)
            if end < len(chain):
                found, rows_found, _ = self._find(hashes[end:])
                rows[end:][found] = rows_found
                for unit in np.flatnonzero(rows == 0).tolist():
                    rows[unit] = row = self._overflow.get(chain[unit], 0)
                    if not row:
                        rows[unit:] = 0
                        break
        return [masks.array.take(rows) for masks in self._masks]

    def _run_length(self, row: int, hashes: _Hashes) -> int:
        """How many of the units lie in rows in order from this one on, as those do that came together."""
        there = self._hashes.array[row : row + len(hashes)]
        run = slice(row, row + len(there))
        is_here = reduce(np.bitwise_or, [masks.array[run] for masks in self._masks]) != 0  # else it was given back
        is_here &= (there == hashes[: len(there)]).view(np.uint32).ravel() == _ALL_WORDS
        return len(there) if is_here.all() else int(is_here.argmin())

    def put(self, units: Sequence[UnitHash], columns: _Places, fields: Masks, values: Masks) -> None:
        """Put `values` into the bits `fields` of the units' masks in these columns. All: [len(units)].

        A field of a unit that is put several times must get the same value each time. Raises OSError when there is no
        memory for new units: then nothing was put.
        """
        hashes = _hashes(units)
        rows, cells = np.zeros((2, len(units)), np.intp)
        found, rows[found], cells[found] = self._find(hashes)
        missing = np.flatnonzero(rows == 0)
        if self._overflow:
            rows[missing] = [self._overflow.get(units[unit], 0) for unit in missing.tolist()]
            missing = np.flatnonzero(rows == 0)
        new = {units[unit]: unit for unit in missing[values[missing] != 0].tolist()}
        if new:
            new_rows = self._insert(list(new), hashes.take(list(new.values()), 0))
            if len(new) == len(missing):  # mostly
                rows[missing] = new_rows
            else:
                row_of = dict(zip(new, new_rows.tolist(), strict=True))
                rows[missing] = [row_of.get(units[unit], 0) for unit in missing.tolist()]
        for column, masks in enumerate(self._masks):
            here = np.flatnonzero((columns == column) & (rows != 0))
            np.bitwise_and.at(masks.array, rows[here], ~fields[here])
            np.bitwise_or.at(masks.array, rows[here], values[here])
        self._remove_empty(units, rows, cells)

    def _find_one(self, unit_hash: UnitHash) -> int:
        """Its row, 0: it is not here."""
        bucket = int.from_bytes(unit_hash[:8], "little") & (2 * self._half - 1)
        begin = _LINE_BYTES * (bucket if bucket < self._num_buckets else bucket - self._half)
        tag, find = unit_hash[8 : 8 + _TAG_BYTES], self._tags.bytes.find
        at = find(tag, begin, begin + _LINE_BYTES)
        while at >= 0:
            if at % _TAG_BYTES == 0:
                row = int(self._row_of.items[at // _TAG_BYTES])
                if row and self._hashes.bytes[row * HASH_BYTES : (row + 1) * HASH_BYTES] == unit_hash:
                    return row
            at = find(tag, at + 1, begin + _LINE_BYTES)
        return self._overflow.get(unit_hash, 0)

    def _find(self, hashes: _Hashes) -> tuple[_Places, _Places, _Places]:
        """Which of the units lie in cells, their rows and the cells; row 0 is as good as none."""
        buckets = self._buckets(hashes)
        matches = np.flatnonzero(self._tags.array.take(buckets, 0) == _tags(hashes)[:, None])
        units = matches >> _CELL_BITS
        cells = (buckets.take(units) << _CELL_BITS) + (matches & (CELLS - 1))
        rows = self._row_of.items.take(cells).astype(np.intp)
        equal = self._hashes.array.take(rows, 0) == hashes.take(units, 0)  # [matches, _WORDS]
        is_unit = equal.view(np.uint32).ravel() == _ALL_WORDS
        if not is_unit.all():
            units, rows, cells = units[is_unit], rows[is_unit], cells[is_unit]
        return units, rows, cells

    def _buckets(self, hashes: _Hashes) -> _Places:
        """
        | 0 … split | split … half | half … half + split |       num_buckets = half + split
          split       not yet        the other halves of the first
        """
        buckets = (hashes[:, 0] & np.uint64(2 * self._half - 1)).astype(np.intp)
        buckets -= self._half * (buckets >= self._num_buckets)
        return buckets

    def _insert(self, units: Sequence[UnitHash], hashes: _Hashes) -> _Places:
        """Rows for units that have none."""
        while len(self) + len(units) > MAX_UNITS_PER_BUCKET * self._num_buckets:
            self._split()
        num_reused = min(len(units), len(self._free_rows))
        reused = sorted(self._free_rows[len(self._free_rows) - num_reused :])  # in order: see _run_length
        del self._free_rows[len(self._free_rows) - num_reused :]
        end = self._num_rows + len(units) - num_reused
        rows = np.concatenate((np.array(reused, np.intp), np.arange(self._num_rows, end)))
        self._num_rows = end
        self._hashes.array[rows] = hashes
        self._place(units, hashes, rows)
        return rows

    def _place(self, units: Sequence[UnitHash], hashes: _Hashes, rows: _Places) -> None:
        """Each into an empty cell of its bucket, or into the overflow."""
        buckets = self._buckets(hashes)
        order = np.argsort(buckets, kind="stable")
        buckets = buckets[order]
        tags = _tags(hashes)[order]
        each = np.arange(len(order))
        nth = each - np.searchsorted(buckets, buckets)  # of the units of its bucket
        empty = np.flatnonzero(self._tags.array.take(buckets, 0) == 0)  # in [each, CELLS]
        empty = np.append(empty, CELLS * len(order))
        takes = empty.take(np.searchsorted(empty, CELLS * each) + nth, mode="clip")
        placed = np.flatnonzero((takes >> _CELL_BITS == each) & (tags != 0))
        cells = (buckets[placed] << _CELL_BITS) + (takes[placed] & (CELLS - 1))
        self._tags.items[cells] = tags[placed]
        self._row_of.items[cells] = rows[order[placed]]
        if len(placed) < len(units):
            is_left = np.ones(len(order), bool)
            is_left[placed] = False
            self._overflow.update((units[unit], int(rows[unit])) for unit in order[is_left].tolist())

    def _remove_empty(self, units: Sequence[UnitHash], rows: _Places, cells: _Places) -> None:
        """Those whose masks are all 0 now."""
        is_empty = rows != 0
        for masks in self._masks:
            is_empty &= masks.array.take(rows) == 0
        if not is_empty.any():
            return
        is_in_cell = is_empty & (self._row_of.items.take(cells) == rows)
        for unit in np.flatnonzero(is_empty & ~is_in_cell).tolist():
            self._overflow.pop(units[unit], None)  # a unit may be put several times
        for items in (self._tags.items, self._row_of.items):
            items[cells[is_in_cell]] = 0
        self._free_rows.extend(set(rows[is_empty].tolist()))

    def _split(self) -> None:
        """SPLIT_BUCKETS more: of as many, the units whose next bit is set move on, each into the same cell."""
        lower, upper = self._num_buckets - self._half, self._num_buckets
        next_bit = np.uint64(self._half)
        self._fit(upper + SPLIT_BUCKETS)
        rows = self._row_of.array[lower : lower + SPLIT_BUCKETS]
        moves = self._hashes.array[rows, 0] & next_bit != 0
        for cells in (self._tags.array, self._row_of.array):
            old, new = cells[lower : lower + SPLIT_BUCKETS], cells[upper : upper + SPLIT_BUCKETS]
            new[moves] = old[moves]
            old[moves] = 0
        if len(self._overflow) * OVERFLOW_SHARE > len(self):
            num_retries = min(RETRIES, len(self._overflow))
            again = dict(self._overflow.popitem(last=False) for _ in range(num_retries))  # who waits longest
            places = np.fromiter(again.values(), np.intp)
            self._place(list(again), self._hashes.array.take(places, 0), places)

    def _fit(self, num_buckets: int) -> None:
        """Have so many, once there is memory for all of them."""
        for memory in (self._tags, self._row_of):
            memory.fit(num_buckets)
        for memory in (self._hashes, *self._masks):
            memory.fit(_rows_of(num_buckets))
        self._num_buckets = num_buckets
        self._half = 1 << (num_buckets.bit_length() - 1)


def _rows_of(num_buckets: int) -> int:
    return MAX_UNITS_PER_BUCKET * num_buckets + 1


def _hashes(units: Sequence[UnitHash]) -> _Hashes:
    return np.frombuffer(b"".join(units), "<u8").reshape(-1, _WORDS)


def _tags(hashes: _Hashes) -> NDArray[np.uint32]:
    """Bytes 8 to 11 of each; buckets go by the first 8."""
    return hashes.view("<u4")[:, 2]


class _Memory:
    """An array of rows, 0 at first, that grows where it lies; rows never touched take no memory."""

    array: NDArray[np.unsignedinteger]
    """[rows, width], or [rows] where the width is 1."""
    items: NDArray[np.unsignedinteger]
    """[rows × width], the same."""
    bytes: mmap.mmap
    """The same."""

    def __init__(self, dtype: DTypeLike, width: int = 1) -> None:
        """width: of a row, in items."""
        self._dtype = np.dtype(dtype)
        self._width = width
        self._view(_map(mmap.PAGESIZE))

    def fit(self, num_rows: int) -> None:
        """Have room for as many. Raises OSError when there is no memory: then nothing has changed."""
        num_bytes = size = len(self.bytes)
        while num_bytes < num_rows * self._width * self._dtype.itemsize:
            num_bytes *= 2
        if num_bytes > size:
            memory = self.bytes
            del self.array, self.items  # memory that is in view cannot move
            try:
                memory = _resized(memory, num_bytes)
            finally:
                self._view(memory)

    def _view(self, memory: mmap.mmap) -> None:
        self.bytes = memory
        self.items = np.frombuffer(memory, self._dtype)
        self.array = self.items.reshape(-1, self._width) if self._width > 1 else self.items


def _map(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _resized(memory: mmap.mmap, num_bytes: int) -> mmap.mmap:
    try:
        memory.resize(num_bytes)  # mremap: pages are not copied
    except SystemError:  # no such call here
        grown = _map(num_bytes)
        grown[: len(memory)] = memory[:]
        memory = grown
    if num_bytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
