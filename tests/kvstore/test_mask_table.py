"""The table of masks says what a dict says, whatever its units' hashes have in common."""

from __future__ import annotations

import errno
import mmap
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import mask_table
from kvstore.mask_table import CELLS, MaskTable
from wire.ids import UnitHash

NUM_COLUMNS = 2
FIELD = 7

one_bucket = [UnitHash(bytes(8) + b"tags" + i.to_bytes(20, "big")) for i in range(2 * CELLS)]
"""Equal in all that a cell is found by: only the whole hash tells them apart, and most have no cell."""
no_tags = [UnitHash(i.to_bytes(32, "little")) for i in range(CELLS)]
"""The tag of an empty cell; the first is 0 altogether."""
spread = [UnitHash(random.Random(i).randbytes(32)) for i in range(40)]
UNITS = one_bucket + no_tags + spread

changes = st.tuples(st.sampled_from(UNITS), st.integers(0, NUM_COLUMNS - 1), st.integers(0, 20), st.integers(0, FIELD))
batches = st.lists(st.lists(changes, min_size=1, max_size=40), max_size=12)


class Model:
    """A table, and a dict of what was put: (unit, column, the field's shift) → value."""

    def __init__(self) -> None:
        self.table = MaskTable()
        for _ in range(NUM_COLUMNS):
            self.table.add_column()
        self.values: dict[tuple[UnitHash, int, int], int] = {}

    def put(self, batch: list[tuple[UnitHash, int, int, int]]) -> None:
        """Each field of a unit once: the last one counts."""
        by_field = {(unit, column, 3 * slot): value for unit, column, slot, value in batch}
        self.values |= by_field
        fields = list(by_field)
        shifts = np.array([shift for _, _, shift in fields], np.uint64)
        self.table.put(
            [unit for unit, _, _ in fields],
            np.array([column for _, column, _ in fields]),
            np.uint64(FIELD) << shifts,
            np.array(list(by_field.values()), np.uint64) << shifts,
        )

    def masks(self) -> dict[UnitHash, list[int]]:
        """Of the units that have any."""
        masks: dict[UnitHash, list[int]] = {}
        for (unit, column, shift), value in self.values.items():
            if value:
                masks.setdefault(unit, [0] * NUM_COLUMNS)[column] |= value << shift
        return masks

    def check(self, chain: list[UnitHash]) -> None:
        expected, masks = [], self.masks()
        for unit in chain:
            if unit not in masks:
                break
            expected.append(masks[unit])
        found = [column.tolist() for column in self.table.get(chain)]
        none = [[0] * NUM_COLUMNS] * (len(chain) - len(expected))
        assert [list(of_unit) for of_unit in zip(*found, strict=True)] == expected + none


@given(batches=batches, chains=st.lists(st.lists(st.sampled_from(UNITS), min_size=1), max_size=3))
@settings(deadline=None)
def test_it_holds_what_was_put(
    batches: list[list[tuple[UnitHash, int, int, int]]], chains: list[list[UnitHash]]
) -> None:
    model = Model()
    for batch in batches:
        model.put(batch)
        for unit in UNITS:
            model.check([unit])
        for chain in (*chains, list(model.masks())):
            if chain:
                model.check(chain)
        assert len(model.table) == len(model.masks())


def test_units_that_come_go_and_come_again_in_another_order_are_told_apart() -> None:
    model = Model()
    for some in (spread, spread[::-1], spread[10:30], [*spread[20:], *spread[:20]]):
        model.put([(unit, 0, 0, 1 + i % FIELD) for i, unit in enumerate(some)])
        for chain in (spread, spread[::-1], some):
            model.check(chain)
        model.put([(unit, 0, 0, 0) for unit in some[::2]])
        for chain in (spread, some[1::2], some):
            model.check(chain)
        model.put([(unit, 0, 0, 0) for unit in some])
        assert len(model.table) == 0


def test_a_row_given_back_is_no_unit_s_though_the_unit_is_elsewhere_again() -> None:
    model = Model()
    first, second, third = spread[:3]
    model.put([(unit, 0, 0, 5) for unit in (first, second, third)])
    for unit in (second, third):
        model.put([(unit, 0, 0, 0)])
    model.put([(second, 0, 0, 5)])  # into the row that was the third's
    assert model.table._find_one(second) == 3
    model.check([first, second])


def test_it_grows_and_what_is_gone_leaves_room() -> None:
    draws = random.Random(1)
    units = [UnitHash(draws.randbytes(32)) for _ in range(6000)]
    model = Model()
    for _ in range(2):
        for begin in range(0, len(units), 500):
            model.put([(unit, 1, begin % 21, 5) for unit in units[begin : begin + 500]])
            model.check(units[: begin + 500])
        num_rows = model.table._num_rows
        assert len(model.table) == num_rows - 1 == len(units)
        for begin in range(0, len(units), 500):
            model.put([(unit, 1, begin % 21, 0) for unit in units[begin : begin + 500]])
        assert len(model.table) == 0
    assert not model.table._overflow and not model.table._tags.items.any() and not model.table._row_of.items.any()


@pytest.fixture
def memory_left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often memory may grow from now on, once it has an item."""
    left: list[int] = []
    resized: Callable[[mmap.mmap, int], mmap.mmap] = mask_table._resized

    def limited(memory: mmap.mmap, num_bytes: int) -> mmap.mmap:
        if left:
            if not left[0]:
                raise OSError(errno.ENOMEM, "no memory")
            left[0] -= 1
        return resized(memory, num_bytes)

    monkeypatch.setattr(mask_table, "_resized", limited)
    return left


@pytest.mark.parametrize("resizes", range(4))
def test_when_there_is_no_memory_to_grow_nothing_has_changed(memory_left: list[int], resizes: int) -> None:
    draws = random.Random(1)
    units = [UnitHash(draws.randbytes(32)) for _ in range(6000)]
    model, num_failures = Model(), 0
    for begin in range(0, len(units), 500):
        batch = [(unit, 1, 0, FIELD) for unit in units[begin : begin + 500]]
        memory_left[:] = [resizes]
        try:
            model.table.put([unit for unit, *_ in batch], np.ones(500, int), *np.full((2, 500), FIELD, np.uint64))
        except OSError:
            num_failures += 1
            model.check(units[: begin + 1])
            assert len(model.table) == begin
        memory_left.clear()
        model.put(batch)
        model.check(units[: begin + 500])
    assert num_failures


def test_when_there_is_no_memory_for_a_column_there_is_none_more(memory_left: list[int]) -> None:
    model = Model()
    memory_left[:] = [0]
    with pytest.raises(OSError, match="no memory"):
        model.table.add_column()
    model.put([(unit, 1, 0, 5) for unit in spread])
    model.check(spread)
