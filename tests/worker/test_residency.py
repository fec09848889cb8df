from __future__ import annotations

from gpu_worker.residency import Found, Residency
from gpu_worker.transfer.port import UnitPlace
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


def test_a_new_owner_voids_the_page_before_its_first_slot() -> None:
    generations = [0] * 8
    voided: list[PageUnits] = []
    residency = Residency(32, 8, generations=generations, on_void=voided.extend)
    residency.written(table(1), HASHES[:2], 0, 32)
    residency.granted(table(1), 0, [], 0)
    assert voided == [PageUnits(PageId(1), HASHES[:2])]
    assert residency.pages() == []
    assert generations == [0, 1, 0, 0, 0, 0, 0, 0]
    assert residency.find(HASHES).places == []


def test_a_page_is_told_of_while_it_still_holds_its_units() -> None:
    seen: list[list[UnitPlace]] = []
    residency = Residency(32, 8, on_void=lambda pages: seen.append(residency.find(HASHES[:2]).places))
    residency.written(table(1), HASHES[:2], 0, 32)
    residency.void(table(1, 2))
    assert seen == [[UnitPlace(PageId(1), 0), UnitPlace(PageId(1), 1)]]


def test_shared_pages_are_nobodys_new_ones_and_the_page_behind_them_is() -> None:
    """[0, 32) shared in page 1 | page 2, copied, goes on at 40 | page 3"""
    generations = [0] * 8
    residency = Residency(32, 8, generations=generations)
    residency.written(table(1), HASHES[:2], 0, 32)
    residency.written(table(2), [*HASHES[:2], HASHES[2]], 32, 32)
    residency.void(table(2))
    residency.copied([copy(5, 2, 8)])
    residency.written(table(3), OTHER[:2], 0, 32)
    residency.granted(table(1, 2, 3), 0, HASHES[:2], 40)
    assert generations == [0, 0, 2, 1, 0, 0, 0, 0]
    assert residency.pages() == [PageUnits(PageId(1), HASHES[:2])]


def test_a_page_that_begins_with_the_sequences_own_units_keeps_those() -> None:
    generations = [0] * 8
    residency = Residency(64, 8, generations=generations)
    residency.pulled(table(4, 5), [0, 0], HASHES[:7])
    residency.granted(table(4, 5), 0, HASHES[:7], 112)  # as pulled: nothing is to be voided
    assert generations == [0] * 8
    residency.granted(table(4, 5), 0, HASHES[:6], 96)  # unit 6 is to be written again
    assert generations == [0, 0, 0, 0, 0, 1, 0, 0]
    assert residency.pages() == [PageUnits(PageId(4), HASHES[:4]), PageUnits(PageId(5), HASHES[4:6])]


def test_a_pull_that_ends_late_places_nothing_in_a_page_that_has_a_new_owner() -> None:
    residency = Residency(32, 8)
    generations = residency.void(table(1, 2))
    residency.void(table(2))
    residency.pulled(table(1, 2), generations, HASHES[:4])
    assert residency.pages() == [PageUnits(PageId(1), HASHES[:2])]


def test_a_boundary_page_of_another_chain_keeps_nothing() -> None:
    residency = Residency(64, 8)
    residency.written(table(4), OTHER[:4], 0, 64)
    residency.granted(table(4), 0, HASHES[:2], 32)
    assert residency.pages() == []


def test_leading_units_are_found_wherever_they_lie_and_a_page_that_moved_is_noticed() -> None:
    residency = Residency(32, 8)
    residency.written(table(1, 2), HASHES[:4], 0, 64)
    residency.written(table(3), HASHES[:2], 0, 32)
    residency.void(table(1))
    found = residency.find(HASHES[:6])
    assert found.places == [UnitPlace(PageId(page), index) for page in (3, 2) for index in (0, 1)]
    residency.written(table(3, 2, 4), HASHES[:5], 64, 80)
    assert residency.still(found)
    residency.void(table(2))
    assert not residency.still(found)
    assert residency.find(HASHES[:6]).places == found.places[:2]


def test_a_chain_that_begins_elsewhere_is_not_found() -> None:
    residency = Residency(32, 8)
    residency.written(table(1, 2), HASHES[:4], 0, 64)
    residency.void(table(1))
    assert residency.find(HASHES[:4]).places == []
    assert len(residency.find(HASHES[2:4]).places) == 2


def test_generations_that_cannot_be_are_not_still_right() -> None:
    residency = Residency(32, 8)
    assert residency.still(Found([UnitPlace(PageId(1), 0)], [0]))
    assert not residency.still(Found([UnitPlace(PageId(8), 0)], [0]))
    assert not residency.still(Found([UnitPlace(PageId(1), 0)], []))


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


def test_clear_forgets_everything_and_no_page_stays_what_it_was() -> None:
    residency = Residency(16, 8)
    residency.written(table(1), HASHES[:1], 0, 16)
    found = residency.find(HASHES)
    residency.clear()
    assert residency.pages() == []
    assert residency.find(HASHES).places == []
    assert not residency.still(found)
