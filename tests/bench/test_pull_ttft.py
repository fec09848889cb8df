"""The benchmark of pulled prefixes, on its own figures."""

from __future__ import annotations

import pytest

from bench.pull_ttft import Round, ratio


def test_the_ratio_is_of_medians() -> None:
    rounds = [Round(0.1, 1.0), Round(0.3, 2.0), Round(9.0, 1.0)]
    assert ratio(rounds) == pytest.approx(0.3)
