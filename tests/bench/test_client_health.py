"""The client says when it was the bottleneck."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.client_health import LoopWatch, judge, watch_loop
from bench.measure import Outcome, Result

IDLE = LoopWatch([0.001] * 100, cpu_s=0.1, wall_s=1.0)


def outcome(late_s: float = 0.0, result: Result = Result.OK) -> Outcome:
    return Outcome(1.0, 1.0 + late_s, 2.0, result)


def test_a_client_with_time_to_spare_warns_of_nothing() -> None:
    assert judge(IDLE, [outcome()] * 100).warnings == ()


@pytest.mark.parametrize(
    ("watch", "outcomes", "word"),
    [
        (LoopWatch([0.001], cpu_s=0.95, wall_s=1.0), [outcome()], "95% of its core"),
        (LoopWatch([0.030] * 5, cpu_s=0.1, wall_s=1.0), [outcome()], "loop ran 30 ms late"),
        (IDLE, [outcome(late_s=0.05)], "sent 50 ms late"),
        (
            LoopWatch([0.001], cpu_s=0.1, wall_s=1.0),
            [outcome(), outcome(9, Result.DROPPED)],
            "1 requests were not sent",
        ),
    ],
)
def test_each_cause_of_doubt_is_named(watch: LoopWatch, outcomes: list[Outcome], word: str) -> None:
    (warning,) = judge(watch, outcomes).warnings
    assert word in warning


def test_nothing_sent_is_nothing_late() -> None:
    assert judge(LoopWatch(), []).sent_late_ms is None


async def test_a_blocked_loop_is_seen() -> None:
    async with watch_loop() as watch:
        await asyncio.sleep(0.02)
        time.sleep(0.1)  # noqa: ASYNC251  # blocks the loop on purpose
        await asyncio.sleep(0.02)
    assert max(watch.lags_s) >= 0.08
    assert watch.wall_s >= 0.14
