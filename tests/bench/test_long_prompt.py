"""A round of bench.long_prompt: which gaps count, and which rounds are refused."""

from __future__ import annotations

import pytest

from bench.long_prompt import Round, judge
from bench.measure import Outcome, Result
from bench.openai_stream import BenchFailed


def stream(times_s: list[float]) -> Outcome:
    return Outcome(0.0, 0.0, times_s[-1], Result.OK, token_event_times_s=times_s)


def long(cached_tokens: int = 0) -> Outcome:
    """Sent at 10 s, first token at 12 s."""
    return Outcome(10.0, 10.0, 12.1, Result.OK, token_event_times_s=[12.0, 12.1], cached_tokens=cached_tokens)


def test_gaps_beside_the_prompt_are_those_that_overlap_its_prefill() -> None:
    found: Round = judge([stream([9.0, 9.5, 10.5, 11.0, 13.0, 13.1])], long())
    assert found.ttft_s == 2.0
    assert (found.before_ms.count, found.beside_ms.count) == (2, 3), "the gap in which it was sent counts on both sides"
    assert found.beside_ms.max == pytest.approx(2000.0), "a stall that outlasts the first token counts whole"


def test_a_round_that_would_flatter_the_server_is_refused() -> None:
    with pytest.raises(BenchFailed, match="--stream-tokens"):
        judge([stream([9.0, 9.5, 10.5, 11.9])], long())
    with pytest.raises(BenchFailed, match="cached"):
        judge([stream([9.0, 9.5, 13.0])], long(cached_tokens=16))
    with pytest.raises(BenchFailed, match="--settle-s"):
        judge([stream([10.5, 11.0, 13.0])], long())
    failed = Outcome(0.0, 0.0, 1.0, Result.ERROR, "timeout")
    with pytest.raises(BenchFailed, match="timeout"):
        judge([failed], long())
