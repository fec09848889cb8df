"""KV pulled from another worker, or from a worker's own lower tiers: what it saves, holds, and what becomes of it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.prefix_hash import chain
from scheduler.commands import Admission
from scheduler.events import CancelRequested, WorkerDown, WorkerUp
from scheduler.policy.transfers import DISTRUST_S
from tests.engine.driver import ROOT, Driver, make_request, prompt, slow
from tests.engine.paged_worker import PagedWorker, expected_output
from wire.ids import UNIT_TOKENS, PullId, RequestId, UnitHash
from wire.plan import Tier

CACHED = prompt(200)
CACHED_UNITS = 200 // UNIT_TOKENS
ASKED = [*CACHED, 5, 6, 7]
LONGER = [*CACHED, *prompt(100, 3)]


@dataclass
class Scene:
    """Request r runs on `target` and waits for a pull from `source`, which is under way."""

    driver: Driver
    source: PagedWorker
    target: PagedWorker
    pull_id: PullId

    def end(self) -> None:
        """Let everything run on; r's output is right and nothing stays behind."""
        self.driver.run()
        self.driver.assert_done("r")
        assert self.driver.outputs["r/0"] == expected_output(ASKED, make_request("x", [2], 8).sampling)


def warm(**config: Any) -> tuple[Driver, PagedWorker]:
    """A worker holds LONGER and runs as many sequences as it may; the other one is empty. And the one that holds it."""
    driver = Driver(**{"workers": 2, "pages": 64, "pulls": True, "step_us": slow, "max_running": 1, **config})
    driver.arrive("warm", LONGER, 1)
    driver.run()
    home = driver.finished["warm"].terminal.stats.worker_id
    for number in range(driver.config.max_running or 0):
        driver.arrive(f"holder{number}", CACHED, 100)
    assert all(w.is_idle == (w.info.worker_id != home) for w in driver.workers.values())
    return driver, next(w for w in driver.workers.values() if w.info.worker_id == home)


def pulling(**config: Any) -> Scene:
    driver, source = warm(**config)
    target = next(w for w in driver.workers.values() if w is not source)
    driver.arrive("r", ASKED, 8)
    driver.step(end_pulls=False)
    (pull_id,) = target.pulls
    for number in range(driver.config.max_running or 0):
        driver.feed(CancelRequested(RequestId(f"holder{number}"), "disconnect"))
    return Scene(driver, source, target, pull_id)


def admission(driver: Driver, name: str = "r") -> Admission:
    return driver.finished[name].timeline.admissions[-1]


def prefilled(driver: Driver, name: str) -> int:
    """Tokens of a request that were in prefill chunks."""
    ids = {c.seq_id for plan in driver.plans for c in plan.prefill_chunks if c.start and c.start.request_id == name}
    return sum(c.num_tokens for plan in driver.plans for c in plan.prefill_chunks if c.seq_id in ids)


def test_a_prefix_cached_elsewhere_is_pulled_and_only_the_rest_is_prefilled() -> None:
    scene = pulling()
    scene.end()
    driver = scene.driver
    assert prefilled(driver, "r") == len(ASKED) - CACHED_UNITS * UNIT_TOKENS
    assert admission(driver).pull_source == scene.source.info.worker_id
    assert admission(driver).pulled_tokens == CACHED_UNITS * UNIT_TOKENS
    (transfer,) = driver.finished["r"].timeline.transfers
    assert (transfer.num_units, transfer.failure, transfer.is_handoff) == (CACHED_UNITS, None, False)
    assert driver.finished["r"].terminal.stats.cached_tokens == CACHED_UNITS * UNIT_TOKENS
    held = driver.engine.twin.lookup(chain(ROOT, CACHED))
    assert {prefix.device for prefix in held.values()} == {CACHED_UNITS} and len(held) == 2, "now both hold it"


def test_nothing_is_pulled_where_prefilling_is_predicted_faster_and_the_candidate_says_so() -> None:
    driver, _ = warm(step_us=lambda work: 100.0)
    driver.arrive("r", ASKED, 8)
    driver.run()
    (candidate,) = admission(driver).candidates
    assert candidate.predicted_pull_s > candidate.predicted_prefill_s > 0
    assert candidate.pulled_tokens == candidate.pull_cost_tokens == 0 and not candidate.pull_source
    assert not driver.finished["r"].timeline.transfers
    assert prefilled(driver, "r") == len(ASKED)


def test_the_sources_pages_are_pinned_until_the_final_report() -> None:
    scene = pulling()
    assert scene.driver.pages(scene.source).in_use == CACHED_UNITS
    scene.target.renew_pull(scene.pull_id)
    scene.driver.deliver(scene.target)
    assert scene.driver.pages(scene.source).in_use == CACHED_UNITS
    scene.target.finish_pull(scene.pull_id)
    scene.driver.deliver(scene.target)
    assert scene.driver.pages(scene.source).in_use == 0
    scene.end()


def test_a_silent_pull_overruns_its_lease_and_its_pages_retire_until_it_is_over() -> None:
    scene = pulling(pull_lease_ms=50)
    driver = scene.driver
    driver.pass_time(1.0)
    assert driver.plans[-1].cancelled_pulls or driver.plans[-2].cancelled_pulls
    driver.step_until(lambda: "r" in driver.finished)
    assert driver.pages(scene.source).in_use == 0, "unpinned"
    assert driver.pages(scene.target).retiring == CACHED_UNITS, "the worker may still write into them"
    scene.target.finish_pull(scene.pull_id)
    driver.deliver(scene.target)
    assert driver.pages(scene.target).retiring == 0
    scene.end()
    (transfer,) = driver.finished["r"].timeline.transfers
    assert "lease of 50 ms" in (transfer.failure or "") and transfer.num_units == 0
    assert not [c for plan in driver.plans for c in plan.kv_pulls if c.pull_id != scene.pull_id], "computed, not pulled"


def test_the_receipt_of_a_sequence_that_is_pulled_again_after_its_first_token_adds_up() -> None:
    driver, source = warm(workers=3)
    driver.arrive("r", ASKED, 20)
    driver.step_until(lambda: len(driver.outputs["r/0"]) > 2, end_pulls=True)
    driver.lose(next(w for w in driver.workers.values() if w is not source and not w.is_idle))
    for _ in range(10):
        driver.step(end_pulls=False)
    driver.run()
    driver.assert_done("r")
    timeline, stats = driver.finished["r"].timeline, driver.finished["r"].terminal.stats
    assert len(timeline.transfers) == 2 and timeline.finished_s is not None
    receipt = stats.queue_s + stats.prefill_s + stats.transfer_s + stats.decode_s + stats.stall_s
    assert receipt == pytest.approx(timeline.finished_s - timeline.arrived_s)


def test_a_renewed_lease_does_not_overrun() -> None:
    scene = pulling(pull_lease_ms=50)
    for _ in range(10):
        scene.driver.pass_time(0.03)
        scene.target.renew_pull(scene.pull_id)
        scene.driver.deliver(scene.target)
    assert scene.driver.pages(scene.source).in_use == CACHED_UNITS
    scene.end()
    assert prefilled(scene.driver, "r") < UNIT_TOKENS


def test_a_request_cancelled_while_its_kv_is_pulled_ends_at_once_and_its_pages_when_the_pull_does() -> None:
    scene = pulling()
    scene.driver.feed(CancelRequested(RequestId("r"), "disconnect"))
    assert "r" in scene.driver.finished
    assert scene.driver.plans[-1].cancelled_pulls == [scene.pull_id]
    assert scene.driver.pages(scene.target).retiring == CACHED_UNITS
    scene.driver.run()
    scene.driver.assert_done("r")


def test_a_sequence_preempted_while_its_kv_is_pulled_comes_back() -> None:
    driver = Driver(pages=20, tier_units=100, step_us=slow)
    driver.arrive("first", CACHED, 4)
    driver.run()
    driver.arrive("evicts", prompt(300, 1), 4)
    driver.run()
    driver.arrive("grows", prompt(20, 9), 250, priority=1)
    driver.step()  # the worker says what moved to its lower tier
    driver.arrive("r", ASKED, 8)
    driver.step_until(lambda: driver.engine.stats().preemptions)
    assert driver.pages(driver.worker).retiring == CACHED_UNITS
    driver.run()
    driver.assert_done("r", "grows")
    assert driver.finished["r"].timeline.preempted_s and not driver.finished["grows"].timeline.preempted_s
    assert driver.outputs["r/0"] == expected_output(ASKED, make_request("x", [2], 8).sampling)


def test_a_target_that_dies_lets_go_of_its_source() -> None:
    scene = pulling()
    scene.driver.lose(scene.target)
    scene.end()
    assert admission(scene.driver).worker_id == scene.source.info.worker_id


def test_a_source_that_dies_leaves_the_rest_to_be_prefilled() -> None:
    scene = pulling()
    scene.driver.lose(scene.source)
    scene.end()
    assert prefilled(scene.driver, "r") == len(ASKED)


@pytest.mark.parametrize("num_units", [0, 1, 7])
@pytest.mark.parametrize("page_size", [16, 64])
def test_of_a_pull_that_fails_what_it_brought_is_used(page_size: int, num_units: int) -> None:
    scene = pulling(page_size=page_size)
    scene.target.finish_pull(scene.pull_id, num_units)
    scene.end()
    assert prefilled(scene.driver, "r") == len(ASKED) - num_units * UNIT_TOKENS
    assert scene.driver.finished["r"].terminal.stats.cached_tokens == num_units * UNIT_TOKENS


@pytest.mark.parametrize("passed_s", [DISTRUST_S / 2, DISTRUST_S + 0.1])
def test_nothing_is_pulled_between_the_same_two_soon_after_a_failure(passed_s: float) -> None:
    scene = pulling()
    scene.target.finish_pull(scene.pull_id, 0)
    scene.end()
    driver = scene.driver
    driver.pass_time(passed_s)
    driver.arrive("holder", LONGER, 100)
    driver.arrive("again", [*LONGER, 5], 4)
    driver.run()
    assert admission(driver, "holder").worker_id == scene.source.info.worker_id
    assert bool(driver.finished["again"].timeline.transfers) == (passed_s > DISTRUST_S)


def test_what_left_a_workers_pages_is_brought_back_from_its_own_lower_tier() -> None:
    driver = Driver(pages=16, tier_units=100, step_us=slow)
    driver.arrive("first", CACHED, 4)
    driver.run()
    driver.arrive("evicts", prompt(220, 1), 4)
    driver.run()
    driver.arrive("r", ASKED, 8)
    driver.run()
    driver.assert_done("r")
    assert admission(driver).pull_source == driver.worker.info.worker_id
    assert prefilled(driver, "r") == len(ASKED) - CACHED_UNITS * UNIT_TOKENS
    assert driver.outputs["r/0"] == expected_output(ASKED, make_request("x", [2], 8).sampling)


def test_what_is_published_but_not_computed_is_neither_indexed_nor_pulled() -> None:
    driver = Driver(workers=2, pages=64, pulls=True, step_us=slow, max_running=1, step_token_budget=256)
    driver.arrive("first", CACHED, 40)
    worker = next(w for w in driver.workers.values() if w.plans)
    assert worker.plans[0].prefill_chunks[0].num_tokens == len(CACHED), "all of it is published"
    assert not driver.engine.twin.lookup(chain(ROOT, CACHED))
    assert not [u for u in driver.index_updates if u.stored]
    driver.arrive("second", ASKED, 4)
    driver.run()
    assert not driver.finished["second"].timeline.transfers
    assert prefilled(driver, "second") == len(ASKED)


def test_the_index_is_told_what_the_pools_hold_and_a_new_session_begins_afresh() -> None:
    driver = Driver(workers=2, pages=16, pulls=True, tier_units=20, step_us=slow)
    for number in range(12):
        driver.arrive(f"r{number}", prompt(60 + 20 * (number % 5), number % 4), 20)
        driver.step()
    driver.run()
    back = driver.worker
    driver.feed(WorkerDown(back.info.worker_id, back.info.epoch, "the stream broke"))
    back.reconnect()
    driver.feed(WorkerUp(back.info, back.residents(), back.tiers()))
    driver.arrive("last", prompt(100, 1), 20)
    driver.run()
    index: defaultdict[tuple[str, Tier], set[UnitHash]] = defaultdict(set)
    seen: set[str] = set()
    for update in driver.index_updates:
        if update.fresh:
            index[update.worker_id, Tier.DEVICE].clear()
            index[update.worker_id, Tier.HOST].clear()
        assert update.fresh or update.worker_id in seen, "a session begins with what is void"
        seen.add(update.worker_id)
        index[update.worker_id, update.tier] -= set(update.dropped)
        index[update.worker_id, update.tier] |= set(update.stored)
    assert sum(u.fresh for u in driver.index_updates) == 3
    for worker in driver.workers.values():
        name = worker.info.worker_id
        assert index[name, Tier.DEVICE] == {u for page in worker.residents() for u in page.unit_hashes} != set()
        assert index[name, Tier.HOST] == {u for tier in worker.tiers() for u in tier.stored}
