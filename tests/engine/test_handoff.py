"""Prefilled on one worker, decoded on another: overlap, every way it can go wrong, and who waits for whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.commands import FinishRequest
from scheduler.events import CancelRequested, RoleChanged
from tests.engine.driver import Driver, make_request, prompt, slow
from tests.engine.paged_worker import PagedWorker, expected_output
from wire.ids import UNIT_TOKENS, RequestId
from wire.plan import Role

LONG = prompt(200)
BUDGET = 64


def split(*, roles: tuple[Role, ...] = (Role.PREFILL, Role.DECODE), **config: Any) -> Driver:
    return Driver(**{"roles": roles, "pages": 64, "step_us": slow, "step_token_budget": BUDGET, **config})


def ends(driver: Driver) -> tuple[PagedWorker, PagedWorker]:
    """The worker that prefills, and the first that decodes."""
    prefill, decode, *_ = driver.workers.values()
    return prefill, decode


def path(driver: Driver, name: str) -> list[tuple[str, Role]]:
    """Where it ran, one worker after the other."""
    return [(a.worker_id, a.role) for a in driver.finished[name].timeline.admissions]


def wanted(max_tokens: int, tokens: list[int] = LONG) -> list[int]:
    return expected_output(tokens, make_request("x", [2], max_tokens).sampling)


def test_a_short_prompt_is_prefilled_where_it_is_decoded_and_a_long_one_is_handed_off() -> None:
    driver = split()
    driver.arrive("short", prompt(40, 1), 8)
    driver.arrive("long", LONG, 8)
    driver.run()
    driver.assert_done("short", "long")
    assert path(driver, "short") == [("w1", Role.BOTH)]
    assert path(driver, "long") == [("w0", Role.PREFILL), ("w1", Role.DECODE)]
    assert driver.outputs["long/0"] == wanted(8)


def test_a_long_prompt_is_prefilled_where_it_is_decoded_while_the_prefill_worker_is_busy() -> None:
    driver = split()
    for index in range(3):
        driver.arrive(f"long {index}", prompt(200, index), 8)
    driver.run()
    driver.assert_done("long 0", "long 1", "long 2")
    ways = [path(driver, f"long {index}") for index in range(3)]
    assert [("w0", Role.PREFILL), ("w1", Role.DECODE)] in ways and [("w1", Role.BOTH)] in ways


def test_the_pull_begins_before_the_prefill_ends() -> None:
    driver = split()
    _, decode = ends(driver)
    driver.arrive("long", LONG, 8)
    driver.step_until(lambda: decode.pulls)
    assert not driver.outputs["long/0"]
    driver.run()
    transfers = driver.finished["long"].timeline.transfers
    assert len(transfers) > 1 and all(t.is_handoff and t.failure is None for t in transfers)
    assert sum(t.num_units for t in transfers) == len(LONG) // UNIT_TOKENS
    first_token_s = driver.finished["long"].timeline.first_token_s
    assert first_token_s is not None and transfers[0].ended_s < first_token_s


def test_the_first_token_comes_from_the_prefill_worker_and_the_others_from_elsewhere() -> None:
    driver = split()
    prefill, decode = ends(driver)
    driver.arrive("long", LONG, 8)
    driver.step_until(lambda: driver.outputs["long/0"])
    assert not any(work.tokens for work, _ in decode.steps)
    prefilled = sum(work.tokens for work, _ in prefill.steps)
    driver.run()
    assert prefilled == sum(work.tokens for work, _ in prefill.steps) == len(LONG), "it never decodes"
    assert driver.outputs["long/0"] == wanted(8)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_choices_follow_the_first_one(num_tokens: int) -> None:
    driver = split(roles=(Role.PREFILL, Role.DECODE, Role.DECODE))
    driver.arrive("n", LONG, num_tokens, num_choices=3)
    driver.run()
    driver.assert_done("n")
    assert [driver.outputs[f"n/{choice}"] for choice in range(3)] == [wanted(num_tokens)] * 3
    assert driver.finished["n"].terminal.stats.output_tokens == 3 * num_tokens
    prefilled = sum(chunk.num_tokens for plan in driver.plans for chunk in plan.prefill_chunks)
    assert prefilled < len(LONG) + 3 * UNIT_TOKENS


@pytest.mark.parametrize("page_sizes", [(16, 64), (64, 16)])
def test_the_two_ends_may_have_pages_of_different_sizes(page_sizes: tuple[int, int]) -> None:
    driver = split(page_size=page_sizes)
    driver.arrive("long", LONG, 40)
    driver.run()
    driver.assert_done("long")
    assert [role for _, role in path(driver, "long")] == [Role.PREFILL, Role.DECODE]
    assert driver.outputs["long/0"] == wanted(40)


STAGES: dict[str, Callable[[Driver, PagedWorker], object]] = {
    "prefilling": lambda driver, decode: True,
    "pulling": lambda driver, decode: decode.pulls,
    "prefilled": lambda driver, decode: driver.outputs["r/0"] and decode.pulls,
    "decoding": lambda driver, decode: len(driver.outputs["r/0"]) > 3,
}


def at(stage: str, **config: Any) -> Driver:
    """Request r has come so far."""
    driver = split(**config)
    _, decode = ends(driver)
    driver.arrive("r", LONG, 20)
    driver.step_until(lambda: STAGES[stage](driver, decode), end_pulls=stage == "decoding")
    return driver


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("others", [(), (Role.DECODE,)])
def test_a_decode_worker_may_die_at_any_stage(stage: str, others: tuple[Role, ...]) -> None:
    driver = at(stage, roles=(Role.PREFILL, Role.DECODE, *others))
    first = next((w for w in driver.workers.values() if w.info.role is Role.DECODE and not w.is_idle), ends(driver)[1])
    driver.lose(first)
    driver.run()
    driver.assert_done("r")
    assert driver.outputs["r/0"] == wanted(20)
    if not others:
        assert path(driver, "r")[-1][0] == "w0", "better there than nowhere"


@pytest.mark.parametrize("stage", STAGES)
def test_a_prefill_worker_may_die_at_any_stage(stage: str) -> None:
    driver = at(stage)
    driver.lose(ends(driver)[0])
    driver.run()
    driver.assert_done("r")
    assert driver.outputs["r/0"] == wanted(20)
    assert path(driver, "r")[-1][0] == "w1"
    driver.arrive("next", prompt(200, 4), 4)
    driver.run()
    assert path(driver, "next") == [("w1", Role.BOTH)]


@pytest.mark.parametrize("stage", STAGES)
def test_it_may_be_cancelled_at_any_stage(stage: str) -> None:
    driver = at(stage)
    driver.feed(CancelRequested(RequestId("r"), "disconnect"))
    assert "r" in driver.finished
    driver.run()
    driver.assert_done("r")


@pytest.mark.parametrize("stage", ["pulling", "prefilled"])
@pytest.mark.parametrize("num_units", [0, 2])
def test_after_a_failed_pull_it_is_computed_where_it_is_decoded(stage: str, num_units: int) -> None:
    driver = at(stage, roles=(Role.PREFILL, Role.DECODE, Role.DECODE))
    decode = next(w for w in driver.workers.values() if w.pulls)
    decode.finish_pull(next(iter(decode.pulls)), num_units)
    driver.deliver(decode)
    driver.run()
    driver.assert_done("r")
    (_, first_role), (_, then_role) = path(driver, "r")
    assert (first_role, then_role) == (Role.PREFILL, Role.BOTH)
    assert driver.outputs["r/0"] == wanted(20)


def test_a_silent_handoff_overruns_its_lease_and_starts_over() -> None:
    driver = at("prefilled", pull_lease_ms=50)
    prefill, decode = ends(driver)
    driver.pass_time(1.0)
    driver.step_until(lambda: "r" in driver.finished)
    assert driver.finished["r"].terminal.stats.transfer_s >= 1.0
    assert driver.pages(prefill).in_use == 0 and driver.pages(decode).retiring > 0
    driver.run()
    driver.assert_done("r")
    assert driver.outputs["r/0"] == wanted(20)


def parked_without_room(**config: Any) -> Driver:
    """Long is prefilled, and the decode worker has no room for it: others hold most of it."""
    driver = split(**{"pages": 20, "kv_watermark": 0.0, **config})
    driver.arrive("long", LONG, 20)
    driver.arrive("fills", prompt(60, 1), 70)
    driver.arrive("fills too", prompt(60, 2), 110)
    driver.step_until(lambda: driver.outputs["long/0"], end_pulls=True)
    for _ in range(4):
        driver.step()
    assert len(driver.outputs["long/0"]) == 1 and not driver.finished
    return driver


def test_a_decode_worker_without_room_is_waited_for() -> None:
    driver = parked_without_room()
    driver.run()
    driver.assert_done("long", "fills", "fills too")
    assert driver.outputs["long/0"] == wanted(20)
    stats = driver.finished["long"].terminal.stats
    assert stats.transfer_s > stats.decode_s, "it waited longer than it decoded"


def test_what_comes_later_does_not_take_the_room_that_a_prefilled_one_waits_for() -> None:
    driver = parked_without_room()
    number = 0
    while "long" not in driver.finished:
        driver.arrive(f"small{number}", prompt(20, 10 + number), 30)
        number += 1
        driver.step()
        driver.step()
        assert number < 150, "small ones overtake it for ever"
    driver.run()
    driver.assert_done("long", *(f"small{n}" for n in range(number)))


@pytest.mark.parametrize("stage", ["prefilling", "pulling", "prefilled"])
def test_where_nobody_decodes_any_more_the_prefill_worker_does(stage: str) -> None:
    driver = at(stage)
    _, decode = ends(driver)
    driver.feed(RoleChanged(decode.info.worker_id, Role.PREFILL))
    driver.run()
    driver.assert_done("r")
    assert path(driver, "r") == [("w0", Role.PREFILL)]
    assert driver.outputs["r/0"] == wanted(20)


def test_a_decode_worker_that_dies_while_it_is_waited_for_is_not_waited_for() -> None:
    driver = parked_without_room()
    driver.lose(ends(driver)[1])
    driver.run()
    driver.assert_done("long", "fills", "fills too")
    assert driver.outputs["long/0"] == wanted(20)


def test_one_that_is_waiting_for_room_goes_on_at_once_when_its_own_worker_decodes() -> None:
    driver = parked_without_room()
    driver.feed(RoleChanged(ends(driver)[0].info.worker_id, Role.BOTH))
    for _ in range(25):
        driver.step()
    assert list(driver.finished) == ["long"]
    driver.run()
    driver.assert_done("long", "fills", "fills too")


@pytest.mark.parametrize("stage", ["prefilling", "pulling", "prefilled"])
def test_a_worker_that_decodes_by_now_keeps_what_it_prefilled(stage: str) -> None:
    driver = at(stage)
    prefill, decode = ends(driver)
    driver.feed(RoleChanged(prefill.info.worker_id, Role.BOTH))
    driver.lose(decode)
    driver.run()
    driver.assert_done("r")
    assert path(driver, "r") == [("w0", Role.PREFILL)]
    assert driver.outputs["r/0"] == wanted(20)


def test_choices_do_not_wait_for_a_first_one_that_stays() -> None:
    driver = split()
    _, decode = ends(driver)
    driver.arrive("n", LONG, 60, num_choices=3)
    driver.step_until(lambda: driver.outputs["n/0"])
    driver.lose(decode)
    driver.step_until(lambda: driver.outputs["n/2"], end_pulls=True)
    assert len(driver.outputs["n/0"]) < 60
    driver.run()
    driver.assert_done("n")


def test_what_runs_on_a_worker_with_a_new_role_runs_on_and_what_comes_follows_it() -> None:
    driver = split(roles=(Role.PREFILL, Role.DECODE, Role.DECODE))
    for number in range(8):
        driver.arrive(f"before{number}", prompt(40 + 40 * (number % 3), number), 40)
    for _ in range(6):
        driver.step()
    driver.feed(RoleChanged(ends(driver)[0].info.worker_id, Role.DECODE))
    driver.feed(RoleChanged(ends(driver)[1].info.worker_id, Role.PREFILL))
    for number in range(4):
        driver.arrive(f"after{number}", prompt(200, 20 + number), 8)
    driver.run()
    names = [f"before{n}" for n in range(8)] + [f"after{n}" for n in range(4)]
    driver.assert_done(*names)
    assert driver.engine.stats().displaced == driver.engine.stats().preemptions == 0
    for number in range(4):
        assert path(driver, f"after{number}")[-1][0] in ("w0", "w2"), "what decodes now"


def test_a_pair_that_failed_does_not_keep_others_waiting() -> None:
    # Room for one of them where they are decoded.
    driver = split(page_size=(64, 16), pages=20, step_token_budget=128)
    _, decode = ends(driver)
    driver.arrive("r", LONG, 20)
    driver.arrive("second", prompt(200, 5), 20)
    driver.step_until(lambda: driver.outputs["second/0"] and decode.pulls)
    assert not driver.finished and len(driver.outputs["second/0"]) == 1
    decode.finish_pull(next(iter(decode.pulls)), 0)
    driver.deliver(decode)
    driver.run()
    driver.assert_done("r", "second")
    assert path(driver, "second") == [("w0", Role.PREFILL)], "decoded there as well"
    assert driver.outputs["second/0"] == wanted(20, prompt(200, 5))


@pytest.mark.parametrize("stage", STAGES)
def test_the_receipt_adds_up(stage: str) -> None:
    driver = at(stage)
    driver.run()
    waited = parked_without_room()
    waited.run()
    for finish in (driver.finished["r"], *waited.finished.values()):
        assert _receipt(finish) == pytest.approx(_total(finish))


def _receipt(finish: FinishRequest) -> float:
    stats = finish.terminal.stats
    return stats.queue_s + stats.prefill_s + stats.transfer_s + stats.decode_s + stats.stall_s


def _total(finish: FinishRequest) -> float:
    assert finish.timeline.finished_s is not None
    return finish.timeline.finished_s - finish.timeline.arrived_s
