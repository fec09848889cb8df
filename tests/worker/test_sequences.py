from __future__ import annotations

import pytest

from gpu_worker.sequences import SequenceTable
from kvstore.prefix_hash import chain
from tests.worker.fake_runner import CARD, EOS
from tests.worker.plans import ROOT, chunk, grant, greedy, live
from wire.errors import EntryMalformed
from wire.ids import SeqId
from wire.sampling import FinishReason


def make_table() -> SequenceTable:
    return SequenceTable(CARD, num_pages=8, page_size=16)


def test_units_are_hashed_when_full_never_when_their_last_token_is_merely_known() -> None:
    sequence = live(range(1, 41))
    sequence.advance(31)
    assert sequence.unit_hashes == chain(ROOT, range(1, 17))
    sequence.advance(32)
    assert sequence.unit_hashes == chain(ROOT, range(1, 33))
    sequence.advance(40)
    assert len(sequence.unit_hashes) == 2


def test_a_start_inside_a_cached_prefix_hashes_the_prefix_too() -> None:
    table = make_table()
    table.start(chunk(1, 32, 8, tokens=range(1, 41)))
    sequence = table.find(SeqId(1), 0)
    assert sequence is not None
    assert sequence.num_computed == 32
    assert sequence.unit_hashes == chain(ROOT, range(1, 33))


def test_grants_are_absolute_and_repeating_one_changes_nothing() -> None:
    table, sequence = make_table(), live(range(1, 41))
    table.grant(sequence, grant([3, 4], 20))
    table.grant(sequence, grant([4, 5], 48, first_index=1))
    table.grant(sequence, grant([4, 5], 48, first_index=1))
    assert sequence.block_table == [3, 4, 5]
    assert sequence.granted_slots == 48


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (grant([1], 16, first_index=1), "gap"),
        (grant([8], 16), "page 8 of a pool of 8"),
        (grant([1], 17), "granted_slots 17 over 1 pages"),
    ],
)
def test_a_grant_that_cannot_be_placed_is_refused(bad: object, message: str) -> None:
    with pytest.raises(EntryMalformed, match=message):
        make_table().grant(live([1]), bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start_pos", "num_tokens", "children"),
    [(4, 4, None), (0, 0, None), (0, 25, None), (0, 17, None), (0, 8, [(1, 0), (2, 1)]), (0, 8, [(2, 0)])],
    ids=["gap", "empty", "beyond tokens", "beyond grant", "two children", "another's child"],
)
def test_a_chunk_that_does_not_fit_its_sequence_is_refused(
    start_pos: int, num_tokens: int, children: list[tuple[int, int]] | None
) -> None:
    table, sequence = make_table(), live(range(1, 25))
    table.grant(sequence, grant([1], 16))
    with pytest.raises(EntryMalformed):
        table.check_chunk(sequence, chunk(1, start_pos, num_tokens, children=children))


@pytest.mark.parametrize(
    "bad",
    [
        chunk(1, 0, 1, tokens=[CARD.vocab_size]),
        chunk(1, 0, 1, tokens=[1], sampling=greedy(logit_bias=((CARD.vocab_size, 1.0),))),
        chunk(1, 0, 1, tokens=[1, 2], num_prompt=3),
        chunk(1, 0, 1, tokens=[1], num_prompt=0),
        chunk(1, 0, 1, tokens=[1] * CARD.max_model_len),
    ],
    ids=["token", "bias", "prompt beyond tokens", "no prompt", "no room for output"],
)
def test_a_start_outside_the_model_is_refused(bad: object) -> None:
    with pytest.raises(EntryMalformed):
        make_table().start(bad)  # type: ignore[arg-type]


def test_a_newer_incarnation_replaces_an_older_and_never_the_reverse() -> None:
    dropped: list[int] = []
    table = SequenceTable(CARD, num_pages=8, page_size=16, on_drop=lambda s: dropped.append(s.incarnation))
    table.start(chunk(1, 0, 1, tokens=[1], incarnation=0))
    table.start(chunk(1, 0, 1, tokens=[2], incarnation=1))
    table.start(chunk(1, 0, 1, tokens=[3], incarnation=0))
    assert dropped == [0]
    assert table.find(SeqId(1), 0) is None
    current = table.find(SeqId(1), 1)
    assert current is not None
    assert current.token_ids == [2]
    assert table.drop(SeqId(1), 0) is None
    assert len(table) == 1


@pytest.mark.parametrize(
    ("output", "sampling", "reason"),
    [
        ([5], greedy(), None),
        ([EOS], greedy(), FinishReason.STOP),
        ([EOS], greedy(ignore_eos=True), None),
        ([7], greedy(stop_token_ids=(7,), ignore_eos=True), FinishReason.STOP),
        ([5, 6], greedy(2), FinishReason.LENGTH),
        ([5, EOS], greedy(2), FinishReason.STOP),
        ([5] * (CARD.max_model_len - 1), greedy(10_000), FinishReason.LENGTH),
    ],
)
def test_when_a_sequence_ends(output: list[int], sampling: object, reason: FinishReason | None) -> None:
    assert live([1, *output], 1, sampling=sampling).stop_reason(CARD) is reason  # type: ignore[arg-type]
