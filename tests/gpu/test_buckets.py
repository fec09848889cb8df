from __future__ import annotations

import pytest

from gpu_worker.cuda.buckets import SIZES, Bucket, buckets, fitting, padded_inputs
from gpu_worker.step_batch import StepBatch


def decodes(*context_lens: int, page_size: int = 16) -> StepBatch:
    """One decode of each; sequence i has pages i * 10, i * 10 + 1, …"""
    tables = [[i * 10 + page for page in range(-(-n // page_size))] for i, n in enumerate(context_lens)]
    return StepBatch(
        token_ids=[100 + i for i in range(len(context_lens))],
        positions=[n - 1 for n in context_lens],
        slot_mapping=[tables[i][-1] * page_size + (n - 1) % page_size for i, n in enumerate(context_lens)],
        query_lens=[1] * len(context_lens),
        context_lens=list(context_lens),
        block_tables=tables,
        logit_rows=list(range(len(context_lens))),
    )


def test_buckets_come_largest_first_and_hold_every_decode() -> None:
    made = buckets(100, 30)
    assert made == sorted(made, reverse=True)
    assert made[0] == Bucket(100, 30)
    assert {b.num_seqs for b in made} == {1, 2, 4, 8, 16, 32, 48, 64, 96, 100}
    assert {b.width for b in made} == {30, 8, 4}
    assert buckets(1, 1) == [Bucket(1, 1)]
    assert buckets(10_000, 4)[0] == Bucket(SIZES[-1], 4)


@pytest.mark.parametrize(
    ("num_seqs", "pages", "expected"),
    [
        (1, 1, Bucket(1, 4)),
        (1, 5, Bucket(1, 8)),
        (3, 4, Bucket(4, 4)),
        (64, 30, Bucket(64, 30)),
        (65, 9, Bucket(96, 30)),
        (100, 30, Bucket(100, 30)),
        (101, 1, None),
        (1, 31, None),
    ],
)
def test_a_step_takes_the_smallest_bucket_that_holds_it(num_seqs: int, pages: int, expected: Bucket | None) -> None:
    assert fitting(buckets(100, 30), decodes(*[pages * 16] * num_seqs)) == expected


def test_without_the_small_ones_a_step_takes_a_larger_one() -> None:
    assert fitting(buckets(100, 30)[:4], decodes(3)) == Bucket(96, 30)
    assert fitting([], decodes(3)) is None


def test_only_decodes_that_are_all_sampled_in_order_fit() -> None:
    mixed = decodes(5, 9)
    mixed.token_ids, mixed.query_lens = [1, 2, 3], [1, 2]
    assert fitting([Bucket(8, 8)], mixed) is None
    unsampled = decodes(5, 9)
    unsampled.logit_rows = [1]
    assert fitting([Bucket(8, 8)], unsampled) is None


def test_padding_goes_to_the_spare_page_and_nowhere_else() -> None:
    batch = decodes(5, 33)
    inputs = padded_inputs(batch, Bucket(4, 4), spare_page=99, page_size=16)
    assert len(inputs) == Bucket(4, 4).num_inputs
    assert inputs == [
        *(100, 101, 0, 0),
        *(4, 32, 0, 0),
        *(4, 12 * 16, 99 * 16, 99 * 16),
        *(5, 33, 1, 1),
        *(0, 99, 99, 99),
        *(10, 11, 12, 99),
        *([99] * 8),
    ]
    assert batch == decodes(5, 33)


def test_an_exact_fit_has_no_padding() -> None:
    assert 99 not in padded_inputs(decodes(16, 16), Bucket(2, 1), spare_page=99, page_size=16)
