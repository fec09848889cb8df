"""bench.routing: the arms in virtual time keep the bars, and what is printed is what was measured."""

from __future__ import annotations

import pytest

from bench.live_load import Measured
from bench.load import poisson_arrivals
from bench.measure import Outcome, Result
from bench.prefix_workloads import PrefixShape, shared_prefixes, unshared
from bench.routing import Arm, ArmResult, Cell, bars, compare, pages_for, table

SHAPE = PrefixShape(prefixes=24, requests=480)
CELL = Cell(4, pages_for(SHAPE, 4, 0.75), "virtual", 60.0)
RATE = 14.0


def test_precise_routing_keeps_both_bars_in_virtual_time() -> None:
    shared = compare(CELL, list(Arm), [shared_prefixes(SHAPE, 0)], RATE)
    alone = compare(CELL, [Arm.LEAST_LOADED, Arm.PRECISE], [unshared(SHAPE, 0)], RATE)
    held = bars(shared, alone)
    assert len(held) == 4 and all(bar.kept for bar in held), [str(bar) for bar in held]
    hits = {arm: result.figures().prefix_hit_share or 0.0 for arm, result in shared.items()}
    assert hits[Arm.PRECISE] > 0.8 > 0.4 > max(hits[Arm.RANDOM], hits[Arm.LEAST_LOADED])
    assert all(outcome.result is Result.OK for result in shared.values() for outcome in result.outcomes)


def test_pages_are_such_that_all_prefixes_want_the_share_asked_for() -> None:
    assert pages_for(PrefixShape(48, 960), 8, 0.75) == 250


def result_of(ttfts_s: list[float], *, refused: int = 0) -> ArmResult:
    outcomes = [Outcome(0.0, 0.0, t + 1, Result.OK, token_event_times_s=[t, t + 1]) for t in ttfts_s]
    outcomes += [Outcome(0.0, 0.0, 0.1, Result.REJECTED, "HTTP 429")] * refused
    result = ArmResult()
    result.add(Measured(outcomes, 2.0, 0.5, ("the machine was busy",)))
    return result


def test_a_missed_bar_is_said_and_its_value() -> None:
    slow, fast = result_of([1.0] * 10), result_of([0.4] * 10)
    [gain] = bars({Arm.RANDOM: slow, Arm.PRECISE: fast}, {})
    assert not gain.kept and str(gain).endswith("2.50, MISSED")
    kept = bars({}, {Arm.LEAST_LOADED: slow, Arm.PRECISE: slow})
    assert [bar.kept for bar in kept] == [True] * 3
    worse = bars({}, {Arm.LEAST_LOADED: fast, Arm.PRECISE: slow})
    assert [bar.kept for bar in worse] == [False, False, True]


def test_the_table_shows_refusals_cpu_and_warnings() -> None:
    text = table({Arm.RANDOM: result_of([1.0] * 4), Arm.PRECISE: result_of([0.25] * 4, refused=3)}, Arm.RANDOM)
    [row] = [line for line in text.splitlines() if line.startswith("precise")]
    assert row.split()[-1] == "0.25" and row.split()[-2] == "50%"
    assert row.split()[-4:-2] == ["3", "0"]
    assert "warning, precise: the machine was busy" in text


def test_arrivals_of_a_round_are_the_same_for_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Arm, float]] = []

    def measure(cell: Cell, arm: Arm, requests: list[object], seed: int) -> Measured:
        asked.append((arm, requests[-1].at_s))  # type: ignore[attr-defined]
        return Measured(result_of([1.0]).outcomes, 2.0, 0.0, ())

    monkeypatch.setattr("bench.routing.measure_once", measure)
    workload = [shared_prefixes(SHAPE, n) for n in range(2)]
    compare(CELL, [Arm.RANDOM, Arm.PRECISE], workload, RATE)
    assert [arm for arm, _ in asked] == [Arm.RANDOM, Arm.PRECISE, Arm.PRECISE, Arm.RANDOM], "the order turns"
    last_s = [poisson_arrivals(RATE, 480, seed)[-1] for seed in (0, 1)]
    assert [at_s for _, at_s in asked] == [last_s[0]] * 2 + [last_s[1]] * 2
