"""Figures from outcomes, against values worked out by hand or by numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.measure import Figures, Outcome, Result, Slo, figures, percentile, percentiles_ms

SECONDS = st.floats(0, 1e4, allow_nan=False)


def ok(*times_s: float, due_s: float = 0.0, end_s: float | None = None, **counts: int | None) -> Outcome:
    """An answer whose token events came at these times."""
    end_s = end_s if end_s is not None else (times_s[-1] if times_s else due_s)
    return Outcome(due_s, due_s, end_s, Result.OK, token_event_times_s=list(times_s), **counts)  # type: ignore[arg-type]


def failed(result: Result, reason: str) -> Outcome:
    return Outcome(0.0, 0.0, 0.0, result, reason)


@given(st.lists(SECONDS, min_size=1, max_size=50), st.floats(0, 1))
def test_a_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(np.quantile(values, share), abs=1e-9)


@given(st.lists(SECONDS, min_size=1, max_size=50))
def test_percentiles_are_ordered_and_within_the_samples(values: list[float]) -> None:
    found = percentiles_ms(values)
    assert found is not None and found.count == len(values)
    assert 1000 * min(values) <= found.p50 <= found.p90 <= found.p99 <= found.max == 1000 * max(values)


def test_percentiles_of_nothing_are_absent() -> None:
    assert percentiles_ms([]) is None


def test_latencies_of_one_request_run_from_when_it_was_due() -> None:
    outcome = ok(1.5, 1.7, 2.1, due_s=1.0, end_s=2.2, completion_tokens=4)
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.itls_s == pytest.approx([0.2, 0.4])
    assert outcome.tpot_s == pytest.approx(0.2), "three tokens after the first in 0.6 s"
    assert outcome.e2e_s == pytest.approx(1.2)


def test_a_request_that_was_sent_late_is_not_flattered() -> None:
    outcome = Outcome(due_s=1.0, sent_s=3.0, end_s=4.0, result=Result.OK, token_event_times_s=[3.5])
    assert outcome.ttft_s == 2.5


@pytest.mark.parametrize("outcome", [ok(), ok(1.0), ok(1.0, completion_tokens=9), ok(1.0, 2.0, completion_tokens=1)])
def test_what_has_no_second_token_has_no_tpot(outcome: Outcome) -> None:
    assert outcome.tpot_s is None


def test_tokens_are_usages_where_it_came_and_events_otherwise() -> None:
    by_usage, by_events = ok(1.0, 2.0, completion_tokens=5), ok(1.0, 2.0)

    def counted(*outcomes: Outcome) -> tuple[str, int]:
        found = figures(outcomes, 1.0, Slo())
        return found.tokens_counted_from, found.output_tokens

    assert counted(by_usage) == ("usage", 5)
    assert counted(by_events) == ("events", 2)
    assert counted(by_usage, by_events) == ("mixed", 7)
    assert counted(failed(Result.ERROR, "timeout")) == ("none", 0)


def test_throughput_is_of_answers_that_came_through_over_the_whole_run() -> None:
    found = figures(
        [
            ok(1.0, 2.0, prompt_tokens=30, completion_tokens=10),
            ok(1.0, 3.0, prompt_tokens=10, completion_tokens=6),
            failed(Result.REJECTED, "HTTP 429"),
        ],
        4.0,
        Slo(),
    )
    assert (found.output_tok_per_s, found.total_tok_per_s, found.requests_per_s) == (4.0, 14.0, 0.5)
    assert found.prompt_tokens == 40


def test_a_total_without_every_prompts_tokens_is_absent_not_wrong() -> None:
    found = figures([ok(1.0, prompt_tokens=30, completion_tokens=1), ok(1.0)], 1.0, Slo())
    assert found.prompt_tokens is None and found.total_tok_per_s is None


def test_latencies_are_those_of_answers_that_came_through() -> None:
    cut = Outcome(0.0, 0.0, 9.0, Result.ERROR, "stream cut short", token_event_times_s=[8.0])
    found = figures([ok(1.0, 2.0), cut], 9.0, Slo())
    assert found.ttft_ms is not None and found.ttft_ms.max == 1000.0
    assert found.e2e_ms is not None and found.e2e_ms.count == 1


def test_every_request_is_counted_once_with_its_reason() -> None:
    outcomes = [ok(1.0), *[failed(Result.REJECTED, "HTTP 429")] * 3, failed(Result.ERROR, "timeout")]
    found = figures([*outcomes, failed(Result.DROPPED, "too many in flight")], 1.0, Slo())
    assert found.results == {Result.OK: 1, Result.REJECTED: 3, Result.ERROR: 1, Result.DROPPED: 1}
    assert found.reasons == {"HTTP 429": 3, "timeout": 1, "too many in flight": 1}


def good(*outcomes: Outcome, slo: Slo) -> tuple[int, float]:
    goodput = figures(outcomes, 2.0, slo).goodput
    assert goodput is not None
    assert goodput.requests_per_s == goodput.met / 2.0
    return goodput.met, goodput.share


def test_goodput_counts_rejections_errors_and_drops_as_misses() -> None:
    misses = [failed(result, "x") for result in (Result.REJECTED, Result.ERROR, Result.DROPPED)]
    assert good(ok(0.1), *misses, slo=Slo(ttft_ms=200)) == (1, 0.25)


def test_goodput_needs_both_slos() -> None:
    fast, slow_first, slow_gap = ok(0.1, 0.2), ok(0.5, 0.6), ok(0.1, 0.9)
    assert good(fast, slow_first, slow_gap, slo=Slo(ttft_ms=200))[0] == 2
    assert good(fast, slow_first, slow_gap, slo=Slo(itl_ms=150))[0] == 2
    assert good(fast, slow_first, slow_gap, slo=Slo(ttft_ms=200, itl_ms=150))[0] == 1


def test_a_stall_misses_the_itl_slo_though_the_mean_keeps_it() -> None:
    times = [0.01 * i for i in range(10)] + [1.0]
    stalled = ok(*times)
    assert stalled.tpot_s is not None and stalled.tpot_s < 0.15
    assert good(stalled, slo=Slo(itl_ms=150))[0] == 0


def test_an_answer_without_a_token_misses_a_ttft_slo() -> None:
    assert good(ok(), slo=Slo(ttft_ms=1e9))[0] == 0


def test_without_an_slo_there_is_no_goodput() -> None:
    assert figures([ok(1.0)], 1.0, Slo()).goodput is None


def test_the_prefix_hit_share_is_over_tokens_of_requests_that_report_it() -> None:
    def share(*outcomes: Outcome) -> float | None:
        return figures(outcomes, 1.0, Slo()).prefix_hit_share

    reported = ok(1.0, prompt_tokens=100, cached_tokens=50), ok(1.0, prompt_tokens=300, cached_tokens=0)
    assert share(*reported) == 0.125
    assert share(*reported, ok(1.0, prompt_tokens=1000)) == 0.125
    assert share(ok(1.0, prompt_tokens=1000)) is None


def test_no_request_at_all_divides_by_nothing() -> None:
    found: Figures = figures([], 0.0, Slo(ttft_ms=1))
    assert (found.output_tok_per_s, found.ttft_ms, found.tokens_counted_from) == (0.0, None, "none")
    assert found.goodput is not None and found.goodput.share == 0.0
