"""bench.disaggregation: in virtual time roles keep long prompts from decodes, and the table tells chats from them."""

from __future__ import annotations

from bench.disaggregation import ITL_BAR, Arm, ArmResult, Cell, compare, itl_ratio, table
from bench.live_load import Measured
from bench.measure import Outcome, Result, Slo
from bench.prefix_workloads import MixedShape
from wire.plan import Role

SHAPE = MixedShape(duration_s=20.0, chats_per_s=8.0)
CELL = Cell("virtual", 3, 1, pages=512, itl_target_ms=60.0)


def test_decodes_of_a_split_cell_are_undisturbed_and_those_of_a_colocated_one_are_not() -> None:
    results = compare(CELL, SHAPE, rounds=1)
    assert itl_ratio(results, Arm.DISAGGREGATED) <= ITL_BAR < itl_ratio(results, Arm.COLOCATED)
    assert len(results[Arm.COLOCATED].longs) == len(results[Arm.DISAGGREGATED].longs) == 7
    assert results[Arm.UNDISTURBED].longs == []
    outcomes = [o for result in results.values() for o in (*result.chats, *result.longs)]
    assert {outcome.result for outcome in outcomes} == {Result.OK}


def test_only_the_disaggregated_arm_has_roles() -> None:
    assert CELL.roles(Arm.COLOCATED) == CELL.roles(Arm.UNDISTURBED) == [Role.BOTH] * 3
    assert CELL.roles(Arm.DISAGGREGATED) == [Role.PREFILL, Role.DECODE, Role.DECODE]


def result_of(gap_s: float, *, failed: int = 0) -> ArmResult:
    def answer(tokens: int, gap_s: float) -> Outcome:
        times_s = [0.2 + gap_s * n for n in range(20)]
        return Outcome(0.0, 0.0, times_s[-1], Result.OK, token_event_times_s=times_s, prompt_tokens=tokens)

    outcomes = [answer(100, gap_s) for _ in range(5)] + [answer(4000, 1.0)]
    outcomes += [Outcome(0.0, 0.0, 0.1, Result.ERROR, "HTTP 500", prompt_tokens=100)] * failed
    result = ArmResult()
    result.add(Measured(outcomes, 10.0, 0.25, ()), SHAPE)
    return result


def test_the_table_has_the_chats_itl_goodput_and_failures() -> None:
    results = {Arm.UNDISTURBED: result_of(0.010), Arm.COLOCATED: result_of(0.030, failed=5)}
    text = table(results, Slo(ttft_ms=500, itl_ms=20))
    row = {line.split()[0]: line.split() for line in text.splitlines()}
    assert row["undisturbed"][1] == "10.0" and row["colocated"][1] == "30.0", (
        "the long prompt's gaps are not among them"
    )
    assert (row["undisturbed"][8], row["colocated"][8]) == ("100.0%", "0.0%")
    assert (row["undisturbed"][9], row["colocated"][9]) == ("0", "5")
    assert row["colocated"][-1] == "3.00"
