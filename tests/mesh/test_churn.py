"""bench.churn on few workers: what leaves and joins costs no request a token, and nothing is left over."""

from __future__ import annotations

import pytest

from bench.churn import Churn, ChurnResult, report, run_churn, shape_of
from bench.predicted_client import Answers
from wire.plan import Role


@pytest.mark.parametrize("roles", [(Role.BOTH,), (Role.PREFILL, Role.DECODE)], ids=["both", "split"])
def test_workers_killed_and_stopped_all_the_while_cost_no_token_and_no_page(roles: tuple[Role, ...]) -> None:
    result = run_churn(Churn(workers=4, shape=shape_of(400), concurrency=16, every_s=0.8, roles=roles))
    assert result.is_sound, report(result)
    assert len(result.answers.requests) == 400 and sum(result.leaves.values()) >= 3
    assert result.pulls > 0 or Role.BOTH in roles, "a split cell hands every long enough prompt off"


def test_what_is_wrong_or_left_over_is_said() -> None:
    result = ChurnResult(Answers([], wrong=["seed 7: HTTP 500"]), 1.0, left_over={"pages in_use": 3.0})
    assert not result.is_sound
    text = report(result)
    assert "wrong: seed 7: HTTP 500" in text and "left over: pages in_use: 3" in text and "NOT SOUND" in text
