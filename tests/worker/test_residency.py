from __future__ import annotations

from gpu_worker.residency import Residency
from kvstore.prefix_hash import chain
from tests.worker.plans import ROOT, copy
from wire.ids import PageId
from wire.plan import PageUnits

HASHES = chain(ROOT, range(160))
OTHER = chain(ROOT, range(1000, 1160))


def table(*pages: int) -> list[PageId]:
    return [PageId(page) for page in pages]


def test_a_page_holds_the_units_that_are_full() -> None:
    residency = Residency(32, 8)
    residency.written(table(4, 2), HASHES[:2], 0, 40)
    assert residency.pages() == [PageUnits(PageId(4), HASHES[:2])]
    residency.written(table(4, 2), HASHES[:3], 40, 48)
    assert residency.pages() == [PageUnits(PageId(2), HASHES[2:3]), PageUnits(PageId(4), HASHES[:2])]


def test_a_new_writer_voids_the_page_with_its_first_slot() -> None:
    residency = Residency(32, 8)
    residency.written(table(1), HASHES[:2], 0, 32)
    residency.written(table(1), [], 0, 1)
    assert residency.pages() == []
    assert len(residency) == 0


def test_a_copy_takes_over_the_whole_units_among_its_slots() -> None:
    residency = Residency(64, 8)
    residency.written(table(1), HASHES[:4], 0, 64)
    residency.written(table(2), OTHER[:4], 0, 64)
    residency.copied([copy(1, 2, 40)])
    assert residency.pages()[1] == PageUnits(PageId(2), HASHES[:2])
    residency.copied([copy(1, 2, 15)])
    assert [p.page_id for p in residency.pages()] == [1]


def test_a_copy_of_an_unknown_page_voids_its_target() -> None:
    residency = Residency(16, 8)
    residency.written(table(1), HASHES[:1], 0, 16)
    residency.copied([copy(3, 1, 16)])
    assert residency.pages() == []


def test_a_writer_that_continues_a_copied_page_keeps_its_units() -> None:
    residency = Residency(64, 8)
    residency.written(table(1), HASHES[:4], 0, 64)
    residency.copied([copy(1, 2, 63)])
    residency.written(table(2), HASHES[:4], 63, 64)
    assert residency.pages() == [PageUnits(PageId(1), HASHES[:4]), PageUnits(PageId(2), HASHES[:4])]


def test_a_reader_of_shared_pages_leaves_them_alone() -> None:
    residency = Residency(16, 8)
    residency.written(table(1), HASHES[:1], 0, 16)
    residency.written(table(1, 5), HASHES[:1], 16, 20)
    assert residency.pages() == [PageUnits(PageId(1), HASHES[:1])]


def test_clear_forgets_everything() -> None:
    residency = Residency(16, 8)
    residency.written(table(1), HASHES[:1], 0, 16)
    residency.clear()
    assert residency.pages() == []
