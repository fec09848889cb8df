"""bench.one_stream takes the time between tokens, and no answer that is not whole."""

from __future__ import annotations

import pytest

from bench.measure import Outcome, Result
from bench.one_stream import OUTPUT_TOKENS, tpot_s
from bench.openai_stream import BenchFailed


def answer(each_s: float, tokens: int = OUTPUT_TOKENS, result: Result = Result.OK) -> Outcome:
    return Outcome(0.0, 0.0, 9.0, result, token_event_times_s=[5.0 + each_s * i for i in range(tokens)])


def test_the_median_answer_by_token() -> None:
    assert tpot_s([answer(0.010), answer(0.020), answer(0.011)]) == pytest.approx(0.011)


@pytest.mark.parametrize("bad", [answer(0.01, tokens=5), answer(0.01, result=Result.ERROR)])
def test_an_answer_that_is_not_whole_is_no_result(bad: Outcome) -> None:
    with pytest.raises(BenchFailed):
        tpot_s([answer(0.01), bad])
