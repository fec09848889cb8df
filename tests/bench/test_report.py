"""The report: a JSON whose fields others rely on, and a table for people."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.client_health import LoopWatch, judge
from bench.measure import Figures, Outcome, Result, Slo, figures
from bench.report import SCHEMA_VERSION, Report, TargetReport, as_json, as_table, ratios

SETTINGS = {"workload": "chat", "requests": 2}
PERCENTILES = {"count", "mean", "p50", "p90", "p99", "max"}
TARGET = {
    "url",
    "model",
    "duration_s",
    "results",
    "reasons",
    "ttft_ms",
    "itl_ms",
    "tpot_ms",
    "e2e_ms",
    "tokens_counted_from",
    "output_tokens",
    "prompt_tokens",
    "output_tok_per_s",
    "total_tok_per_s",
    "requests_per_s",
    "prefix_hit_share",
    "goodput",
}


def measured(slower: float = 1.0, **counts: int) -> Figures:
    times_s = [0.1 * slower, 0.2 * slower]
    answer = Outcome(0.0, 0.0, 0.2 * slower, Result.OK, token_event_times_s=times_s, **counts)  # type: ignore[arg-type]
    return figures([answer, Outcome(0.0, 0.0, 0.0, Result.REJECTED, "HTTP 429")], 2.0 * slower, Slo(ttft_ms=150))


def report(*found: Figures) -> Report:
    targets = [TargetReport(f"http://s{i}", "m", f) for i, f in enumerate(found)]
    return Report("2026-01-01T00:00:00+00:00", SETTINGS, "closed loop, 1 client(s)", targets, judge(LoopWatch(), []))


def parsed(*found: Figures) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    whole = json.loads(as_json(report(*found)), parse_constant=refuse)
    assert isinstance(whole, dict)
    return whole


FULL = measured(prompt_tokens=10, completion_tokens=2, cached_tokens=5)


def test_the_schema_of_the_json_is_stable() -> None:
    whole = parsed(FULL)
    assert whole["schema_version"] == SCHEMA_VERSION == 1
    assert set(whole) == {"schema_version", "started_at", "load", "settings", "targets", "ratios", "client"}
    (target,) = whole["targets"]
    assert set(target) == TARGET
    for latency in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert set(target[latency]) == PERCENTILES
    assert target["results"] == {"ok": 1, "rejected": 1, "error": 0, "dropped": 0}
    assert set(target["goodput"]) == {"met", "share", "requests_per_s"}
    assert set(whole["client"]) == {"loop_lag_ms", "sent_late_ms", "cpu_share", "warnings"}
    assert whole["ratios"] is None


def test_the_ratios_of_two_are_first_by_second() -> None:
    whole = parsed(measured(slower=2.0), measured())
    assert whole["ratios"]["ttft_ms.p50"] == pytest.approx(2.0)
    assert whole["ratios"]["output_tok_per_s"] == pytest.approx(0.5)
    assert whole["ratios"]["prefix_hit_share"] is None, "neither reports it"


def test_a_ratio_to_nothing_is_absent() -> None:
    nothing = figures([], 1.0, Slo())
    assert set(ratios(FULL, nothing).values()) == {None}
    assert ratios(nothing, FULL)["output_tok_per_s"] == 0.0


def test_the_table_says_what_was_measured_and_how() -> None:
    table = as_table(report(FULL))
    assert "chat: closed loop, 1 client(s)" in table
    assert "TTFT       100.0     100.0     100.0     100.0" in table
    assert "1.0 output, 6.0 with prompts   (2 output tokens, counted from usage, in 2.0 s)" in table
    assert "1 ok, 1 rejected, 0.50/s; HTTP 429 x1" in table
    assert "0.50 requests/s, 50.0% of all kept the SLO" in table
    assert "prefix hit 50.0% of prompt tokens" in table
    assert "A ÷ B" not in table


def test_the_table_of_what_is_missing_says_so() -> None:
    table = as_table(report(figures([Outcome(0, 0, 0, Result.ERROR, "timeout")], 1.0, Slo())))
    assert "TTFT           -         -         -         -" in table
    assert "prefix hit not reported by the server" in table
    assert "goodput" not in table


def test_the_table_of_two_shows_both_and_their_ratios() -> None:
    table = as_table(report(measured(slower=2.0), FULL))
    assert "A  http://s0" in table and "B  http://s1" in table
    ratio_lines = table.partition("A ÷ B")[2]
    assert "TTFT        2.00      2.00      2.00      2.00" in ratio_lines
    assert "output tok/s                  0.50" in ratio_lines


def test_warnings_are_in_the_table() -> None:
    slow_client = judge(LoopWatch([0.5], cpu_s=1.0, wall_s=1.0), [])
    shown = as_table(Report("", SETTINGS, "", [TargetReport("u", "m", FULL)], slow_client))
    assert shown.count("WARNING") == 2
