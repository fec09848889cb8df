"""What the engine promises, one behaviour at a time (design §3 to §5)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scheduler.commands import DispatchPlan, FinishRequest
from scheduler.events import (
    CancelRequested,
    ChoiceProgress,
    FenceLost,
    RequestArrived,
    StepReported,
    Tick,
    WorkerDown,
    WorkerUp,
)
from scheduler.sequence import MAX_FAULTS
from tests.engine.driver import Driver, make_request, prompt, slow
from tests.engine.paged_worker import EOS, PagedWorker, expected_output
from wire.ids import Epoch, PlanId, RequestId
from wire.plan import StepReport
from wire.sampling import FinishReason


def test_decode_is_not_starved_by_long_prefill() -> None:
    driver = Driver(pages=64, step_token_budget=16)
    driver.arrive("short", prompt(4), 40)
    driver.step()
    driver.step()
    driver.arrive("long", prompt(300, 1), 4)
    while "long/0" not in driver.outputs:
        before = len(driver.outputs["short/0"])
        driver.step()
        assert len(driver.outputs["short/0"]) == before + 1, "every step beside the prefill decodes"
    driver.run()
    assert driver.outputs["short/0"] == expected_output(prompt(4), make_request("x", [2], 40).sampling)


def test_steady_decode_sends_a_plan_only_when_the_lease_runs_low() -> None:
    driver = Driver(pages=64, max_lease_steps=16)
    driver.arrive("a", prompt(10), 200)
    driver.run()
    assert len(driver.outputs["a/0"]) == 200
    assert len(driver.plans) <= 200 // 8 + 2


def test_a_prompt_joins_the_plans_of_the_next_step_even_when_they_may_have_begun() -> None:
    driver = Driver(pages=64, step_token_budget=64, max_queued_plans=2)
    for salt, name in enumerate("abc"):
        driver.arrive(name, prompt(10, salt), 20)
    assert [plan.joins for plan in driver.plans] == [False, False, True, True], "b's and c's share a step"
    driver.step()  # of a's chunk: theirs comes next, or runs already
    driver.arrive("d", prompt(10, 3), 20)
    assert [plan.joins for plan in driver.plans[4:]] == [True], "it does not wait for a report"
    driver.arrive("e", prompt(60, 4), 20)
    chunk_tokens = sum(chunk.num_tokens for plan in driver.plans[1:] for chunk in plan.prefill_chunks)
    assert chunk_tokens + len(driver.plans[-1].decodes) == 64, "they may all share one step"
    driver.run()
    sampling = make_request("x", [2], 20).sampling
    for salt, (name, length) in enumerate(zip("abcde", (10, 10, 10, 10, 60), strict=True)):
        assert driver.outputs[f"{name}/0"] == expected_output(prompt(length, salt), sampling)


def test_cancel_is_dispatched_at_once_even_when_plans_are_queued() -> None:
    driver = Driver(pages=64, step_token_budget=16, max_queued_plans=2)
    driver.arrive("long", prompt(300), 4)
    assert len(driver.worker.plans) == 2, "the queue is full"
    commands = driver.feed(CancelRequested(RequestId("long"), "disconnect"))
    plans = [c.plan for c in commands if isinstance(c, DispatchPlan)]
    assert plans and plans[0].releases and plans[0].max_steps == 0
    assert driver.finished["long"].terminal.error_code is None
    driver.run()
    assert driver.engine.stats().workers[0].pages.in_use == 0


def test_cancel_that_overtakes_its_request_ends_it_at_arrival() -> None:
    driver = Driver()
    driver.feed(CancelRequested(RequestId("r"), "disconnect"))
    driver.arrive("r", prompt(5))
    assert "r" in driver.finished and not driver.plans


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("length", [32, 40, 64, 128, 100])
def test_a_repeated_prompt_is_read_from_the_cache(page_size: int, length: int) -> None:
    driver = Driver(pages=16, page_size=page_size, step_token_budget=256)
    driver.arrive("cold", prompt(length))
    driver.run()
    driver.arrive("hit", prompt(length))
    driver.run()
    hit = driver.finished["hit"]
    assert hit.terminal.stats.cached_tokens == min(length - 1, length // 16 * 16)
    assert driver.outputs["hit/0"] == driver.outputs["cold/0"]


def test_a_prefix_in_flight_is_shared_by_the_next_plan() -> None:
    driver = Driver(pages=64, step_token_budget=64)
    driver.arrive("first", prompt(60), 30)
    driver.arrive("second", [*prompt(60), 3, 4, 5], 30)
    driver.run()
    assert driver.finished["second"].terminal.stats.cached_tokens == 48


def test_choices_share_the_prompt_and_one_terminal() -> None:
    driver = Driver(pages=64)
    driver.arrive("n", prompt(70), 6, num_choices=3)
    driver.run()
    assert [len(driver.outputs[f"n/{c}"]) for c in range(3)] == [6, 6, 6]
    stats = driver.finished["n"].terminal.stats
    assert stats.output_tokens == 18 and stats.prompt_tokens == 70
    prefilled = sum(c.num_tokens for plan in driver.plans for c in plan.prefill_chunks)
    assert prefilled <= 70 + 2 * 16


def test_preemption_takes_the_lowest_priority_and_loses_no_token() -> None:
    driver = Driver(pages=8, step_token_budget=64)
    driver.arrive("high", prompt(30, 1), 60, priority=1)
    driver.arrive("low", prompt(30, 2), 60, priority=0)
    driver.run()
    assert driver.engine.stats().preemptions > 0
    assert not driver.finished["high"].timeline.preempted_s
    assert driver.finished["low"].timeline.preempted_s
    for name, salt in (("high", 1), ("low", 2)):
        sampling = make_request("x", [2], 60).sampling
        assert driver.outputs[f"{name}/0"] == expected_output(prompt(30, salt), sampling)


def test_nothing_is_admitted_before_the_preempting_plan_is_reported() -> None:
    driver = Driver(pages=8)
    driver.arrive("a", prompt(30, 1), 80)
    driver.arrive("b", prompt(30, 2), 80)
    driver.arrive("c", prompt(30, 3), 80)
    barrier_plans = 0
    seen = 0
    for _ in range(400):
        driver.step()
        new, seen = driver.plans[seen:], len(driver.plans)
        preempting = [p for p in new if p.releases and p.max_steps]
        for plan in preempting:
            barrier_plans += 1
            assert not any(c.start for c in plan.prefill_chunks), "admitted in the step that preempted"
    assert barrier_plans and len(driver.finished) == 3


def test_tenants_share_service_and_nobody_starves() -> None:
    driver = Driver(pages=8, step_token_budget=32)
    for i in range(30):
        driver.arrive(f"greedy{i}", prompt(60, i), 10, tenant="greedy")
    driver.arrive("modest", prompt(20, 99), 4, tenant="modest")
    driver.run()
    order = list(driver.finished)
    assert len(order) == 31
    assert order.index("modest") < 8, "a tenant with little service goes before another's backlog"


def test_within_a_tenant_priority_then_deadline_then_arrival() -> None:
    driver = Driver(pages=2, step_token_budget=32)
    driver.arrive("running", prompt(16, 0), 4)
    driver.arrive("third", prompt(16, 1), 4)
    driver.arrive("second", prompt(16, 2), 4, deadline_s=5.0)
    driver.arrive("first", prompt(16, 3), 4, priority=1)
    driver.run()
    assert list(driver.finished) == ["running", "first", "second", "third"]


def test_a_request_too_large_for_model_or_pool_is_refused_at_arrival() -> None:
    driver = Driver(pages=4)
    driver.arrive("model", prompt(399), 2)
    driver.arrive("pool", prompt(60), 6)
    driver.arrive("fits", prompt(60), 5)
    assert driver.finished["model"].terminal.error_code == "context_length_exceeded"
    assert "399" in (driver.finished["model"].terminal.error_message or "")
    assert driver.finished["pool"].terminal.error_code == "kv_capacity"
    driver.run()
    assert driver.finished["fits"].terminal.error_code is None


def test_without_a_worker_requests_wait_the_grace_then_end() -> None:
    driver = Driver(workers=0)
    driver.arrive("r", prompt(5))
    driver.now += 3.9
    assert not driver.feed(Tick())
    driver.now += 0.2
    driver.feed(Tick())
    assert driver.finished["r"].terminal.error_code == "worker_lost"


def test_a_lost_workers_sequences_continue_on_another() -> None:
    driver = Driver(workers=2, pages=64)
    driver.arrive("r", prompt(40), 30)
    for _ in range(8):
        driver.step()
    holder = next(w for w in driver.workers.values() if not w.is_idle)
    del driver.workers[holder.info.worker_id]
    driver.feed(WorkerDown(holder.info.worker_id, holder.info.epoch, "killed"))
    driver.run()
    assert driver.outputs["r/0"] == expected_output(prompt(40), make_request("x", [2], 30).sampling)
    assert len(driver.finished["r"].timeline.worker_lost_s) == 1


def test_a_session_break_resumes_from_resident_units() -> None:
    driver = Driver(pages=64)
    driver.arrive("r", prompt(100), 30)
    for _ in range(6):
        driver.step()
    worker = driver.worker
    driver.feed(WorkerDown(worker.info.worker_id, worker.info.epoch, "stream broke"))
    worker.reconnect()
    driver.feed(WorkerUp(worker.info, worker.residents()))
    driver.run()
    resumed = driver.finished["r"].timeline.admissions[-1]
    assert resumed.resumed and resumed.cached_tokens >= 96
    assert driver.outputs["r/0"] == expected_output(prompt(100), make_request("x", [2], 30).sampling)


def test_a_request_that_fails_every_step_is_ended_and_others_go_on() -> None:
    driver = Driver(pages=64)
    driver.arrive("poison", prompt(10), 30)
    for epoch in range(2, MAX_FAULTS + 2):
        old = driver.worker
        report = StepReport(driver.plans[-1].plan_id, 0, True, [], failure="boom")
        fresh = PagedWorker("w0", 64, 16, driver.config.step_token_budget, epoch=epoch)
        driver.workers[old.info.worker_id] = fresh
        driver.feed(old.event(report))
        driver.feed(WorkerUp(fresh.info, []))
    assert driver.finished["poison"].terminal.error_code == "step_failed"
    driver.arrive("next", prompt(10), 5)
    driver.run()
    assert driver.finished["next"].terminal.error_code is None


def test_the_request_that_fails_its_steps_is_found_among_many() -> None:
    driver = Driver(pages=64, step_token_budget=256)
    names = [f"good{i}" for i in range(8)]
    for index, name in enumerate(names):
        driver.arrive(name, prompt(20, index), 30)
    driver.arrive("poison", prompt(20, 99), 30)
    epoch = 1
    while "poison" not in driver.finished:
        worker = driver.worker
        poisoned = any(c.start and c.start.request_id == "poison" for plan in worker.plans for c in plan.prefill_chunks)
        if not poisoned:
            driver.step()
            continue
        epoch += 1
        report = StepReport(worker.plans[0].plan_id, 0, True, [], failure="boom")
        fresh = PagedWorker("w0", 64, 16, driver.config.step_token_budget, epoch=epoch)
        driver.workers[worker.info.worker_id] = fresh
        driver.feed(worker.event(report))
        driver.feed(WorkerUp(fresh.info, []))
    driver.run()
    assert driver.finished["poison"].terminal.error_code == "step_failed"
    for index, name in enumerate(names):
        assert driver.finished[name].terminal.error_code is None
        assert driver.outputs[f"{name}/0"] == expected_output(prompt(20, index), make_request("x", [2], 30).sampling)


def test_a_request_that_makes_progress_outlives_any_number_of_lost_workers() -> None:
    driver = Driver(pages=64)
    driver.arrive("r", prompt(10), 30)
    for _ in range(2 * MAX_FAULTS):
        driver.step()
        driver.step()
        worker = driver.worker
        driver.feed(WorkerDown(worker.info.worker_id, worker.info.epoch, "restarted"))
        worker.reconnect()
        driver.feed(WorkerUp(worker.info, worker.residents()))
    driver.run()
    assert driver.finished["r"].terminal.error_code is None
    assert driver.outputs["r/0"] == expected_output(prompt(10), make_request("x", [2], 30).sampling)


@pytest.mark.parametrize("is_same_epoch", [True, False])
def test_a_link_that_breaks_is_no_requests_fault_a_worker_that_dies_may_be(is_same_epoch: bool) -> None:
    driver = Driver(pages=64)
    driver.arrive("r", prompt(10), 30)
    for epoch in range(2, 2 + MAX_FAULTS):
        worker = driver.worker
        driver.feed(WorkerDown(worker.info.worker_id, worker.info.epoch, "gone"))
        worker.reconnect()
        if not is_same_epoch:
            worker.info = replace(worker.info, epoch=Epoch(epoch))
        driver.feed(WorkerUp(worker.info, worker.residents()))
    driver.run()
    assert driver.finished["r"].terminal.error_code == (None if is_same_epoch else "worker_lost")


def test_a_successor_continues_from_what_was_published() -> None:
    whole = expected_output(prompt(20), make_request("x", [2], 12).sampling)
    driver = Driver()
    request = make_request("r", prompt(20), 12)
    driver.feed(RequestArrived(request, (ChoiceProgress(0, whole[:5]),)))
    driver.run()
    assert driver.outputs["r/0"] == whole[5:]
    driver.feed(RequestArrived(make_request("done", prompt(20), 12), (ChoiceProgress(0, whole, FinishReason.LENGTH),)))
    assert "done" in driver.finished
    driver.feed(RequestArrived(make_request("silent", prompt(20), 12), (ChoiceProgress(0, whole),)))
    assert driver.finished["silent"].terminal.stats.output_tokens == 12


def test_a_successor_does_not_run_past_an_eos_it_was_told() -> None:
    driver = Driver()
    request = make_request("r2", prompt(20), 12)
    request = replace(request, sampling=replace(request.sampling, ignore_eos=False))
    driver.feed(RequestArrived(request, (ChoiceProgress(0, [9, EOS]),)))
    assert "r2" in driver.finished and not driver.plans


def test_a_request_handed_in_again_gets_its_terminal_again() -> None:
    driver = Driver()
    driver.arrive("r", prompt(5), 2)
    driver.run()
    again = driver.engine.handle(RequestArrived(make_request("r", prompt(5), 2)), driver.now + 1)
    assert again == [driver.finished["r"]]
    assert isinstance(again[0], FinishRequest)


def test_a_late_report_changes_nothing() -> None:
    driver = Driver()
    driver.arrive("r", prompt(5), 4)
    driver.run()
    info, late = driver.worker.info, StepReport(PlanId(1), 0, True, [])
    assert driver.feed(StepReported(info.worker_id, info.epoch, late)) == []


def test_after_a_lost_fence_nothing_is_commanded() -> None:
    driver = Driver()
    assert driver.feed(FenceLost()) == []
    assert driver.arrive("r", prompt(5)) == []


def test_requests_spread_over_workers_by_load_and_follow_their_prefix() -> None:
    driver = Driver(workers=2, pages=64)
    driver.arrive("a", prompt(48, 1), 20)
    driver.arrive("b", prompt(48, 2), 20)
    driver.run()
    homes = {name: driver.finished[name].terminal.stats.worker_id for name in ("a", "b")}
    assert homes["a"] != homes["b"]
    driver.arrive("a2", [*prompt(48, 1), 5], 4)
    driver.run()
    assert driver.finished["a2"].terminal.stats.worker_id == homes["a"]
    assert len(driver.finished["a2"].timeline.admissions[0].candidates) == 2


def test_a_page_to_copy_from_is_let_go_when_nobody_wants_the_copy_any_more() -> None:
    driver = Driver(pages=16, page_size=64, max_queued_plans=1)
    driver.arrive("cold", prompt(40), 2)
    driver.run()
    driver.arrive("busy", prompt(10, 1), 1)  # no step follows its own
    driver.arrive("hit", [*prompt(40), 5], 2)
    driver.feed(CancelRequested(RequestId("hit"), "disconnect"))
    driver.run()
    assert sum(len(plan.page_copies) for plan in driver.plans) == 1, "it was to be copied"
    driver.assert_done("busy")


def test_decodes_that_wait_for_a_page_are_sent_no_plans_until_there_is_one() -> None:
    driver = Driver(workers=2, pages=16, pulls=True, step_us=slow, pull_lease_ms=60_000, max_running=1)
    source, target = driver.workers.values()
    driver.arrive("warm", prompt(200), 1)
    driver.run()
    if driver.finished["warm"].terminal.stats.worker_id != source.info.worker_id:
        source, target = target, source
    driver.arrive("holder", prompt(200), 1)
    driver.arrive("pulls", [*prompt(200), 5], 2)  # its source's pages are pinned for it
    driver.step_until(lambda: "holder" in driver.finished and target.pulls)
    driver.arrive("grows", prompt(20, 7), 100)
    for _ in range(200):
        source.run_step()
        driver.deliver(source)
    assert driver.pages(source).free == driver.pages(source).cached == 0 and source.is_idle
    driver.run()
    driver.assert_done("grows", "pulls")
    assert driver.outputs["grows/0"] == expected_output(prompt(20, 7), make_request("x", [2], 100).sampling)
