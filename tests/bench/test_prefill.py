"""A round of bench.prefill: what it counts, and which rounds are refused."""

from __future__ import annotations

import pytest

from bench.measure import Outcome, Result
from bench.openai_stream import BenchFailed
from bench.prefill import judge


def outcome(sent_s: float, first_s: float, cached_tokens: int = 0) -> Outcome:
    return Outcome(sent_s, sent_s, first_s, Result.OK, token_event_times_s=[first_s], cached_tokens=cached_tokens)


def test_tokens_count_from_the_first_prompt_sent_to_the_last_first_token() -> None:
    batch = [outcome(10.0 + i / 100, 11.0 + i / 10) for i in range(8)]
    found = judge(outcome(0.0, 3.0), outcome(4.0, 4.5, cached_tokens=1984), batch)
    assert (found.cold_s, found.cached_s) == (3.0, 0.5)
    assert found.tokens_s == pytest.approx(8 * 128 / 1.7)


def test_a_round_that_would_flatter_the_server_is_refused() -> None:
    good = outcome(0.0, 1.0)
    with pytest.raises(BenchFailed, match="cached"):
        judge(outcome(0.0, 1.0, cached_tokens=16), good, [good])
    failed = Outcome(0.0, 0.0, 1.0, Result.ERROR, "timeout")
    for row in ((failed, good, [good]), (good, failed, [good]), (good, good, [good, failed])):
        with pytest.raises(BenchFailed, match="timeout"):
            judge(*row)
