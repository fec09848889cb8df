"""Units in the cell's Redis tier: any worker reads them, whoever stored them and whatever became of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.prefix_hash import chain
from scheduler.events import ResidencyAudited, StepReported, WorkerDown, WorkerUp
from scheduler.shared_units import SharedUnits
from tests.engine.driver import ROOT, Driver, make_request, prompt, slow
from tests.engine.paged_tiers import PagedRedis
from tests.engine.paged_worker import PagedWorker, expected_output
from wire.ids import UNIT_TOKENS, Epoch, PlanId, UnitHash, WorkerId
from wire.plan import SharedTier, StepReport, Tier, TierUnits

CACHED = prompt(200)
CACHED_UNITS = 200 // UNIT_TOKENS
ASKED = [*CACHED, 5, 6, 7]
PAGES = 16
"""Of each worker: one prompt of 200 tokens pushes out another."""


def newcomer(driver: Driver, redis: PagedRedis | None, name: str = "w1", *, page_size: int = 16) -> PagedWorker:
    worker = PagedWorker(name, PAGES, page_size, 64, step_us=slow, peers=driver.workers, tier_units=2, redis=redis)
    driver.join(worker)
    return worker


def stored(redis: PagedRedis, **config: Any) -> tuple[Driver, PagedWorker]:
    """Worker w1 is up; then w0 pushed CACHED out of its pages, and, but for what its host holds, into Redis."""
    driver = Driver(**{"pages": PAGES, "tier_units": 2, "redis": redis, "step_us": slow, "max_running": 1, **config})
    first = driver.worker
    second = newcomer(driver, redis)
    driver.feed(WorkerDown(second.info.worker_id, second.info.epoch, "its link broke"))  # so that all runs on the first
    for number, tokens in enumerate([CACHED, prompt(220, 1), prompt(220, 2)]):
        driver.arrive(f"warm{number}", tokens, 4)
        driver.run()
    driver.feed(WorkerUp(second.info, second.residents(), []))
    assert set(chain(ROOT, CACHED)) <= redis.units.keys()
    return driver, first


def prefilled(driver: Driver, name: str) -> int:
    """Tokens of a request that were in prefill chunks."""
    ids = {c.seq_id for plan in driver.plans for c in plan.prefill_chunks if c.start and c.start.request_id == name}
    return sum(c.num_tokens for plan in driver.plans for c in plan.prefill_chunks if c.seq_id in ids)


def ask(driver: Driver, name: str, tokens: list[int] = ASKED) -> int:
    """Run a request; returns how many of its tokens were prefilled."""
    driver.arrive(name, tokens, 8)
    driver.run()
    driver.assert_done(name)
    assert driver.outputs[f"{name}/0"] == expected_output(tokens, make_request("x", [2], 8).sampling)
    return prefilled(driver, name)


REST = len(ASKED) - CACHED_UNITS * UNIT_TOKENS


def test_what_a_dead_worker_stored_is_read_by_another() -> None:
    driver, first = stored(PagedRedis(100))
    driver.lose(first)
    assert ask(driver, "r") == REST
    (transfer,) = driver.finished["r"].timeline.transfers
    assert (transfer.source, transfer.target, transfer.failure) == ("w1", "w1", None)
    assert driver.finished["r"].timeline.admissions[0].pull_source == "w1"


def test_what_an_earlier_epoch_stored_is_read_by_the_next() -> None:
    redis = PagedRedis(100)
    driver, first = stored(redis)
    driver.lose(driver.workers[WorkerId("w1")])
    again = PagedWorker("w0", PAGES, 16, 64, epoch=2, step_us=slow, peers=driver.workers, tier_units=2, redis=redis)
    driver.workers[first.info.worker_id] = again
    driver.feed(WorkerUp(again.info, [], []))  # it has not looked into Redis yet
    assert ask(driver, "r") == REST


def test_a_new_scheduler_learns_it_from_the_workers_that_know() -> None:
    """Of what the dead stored, that is what some living worker found in Redis when it started."""
    redis = PagedRedis(100)
    driver, _ = stored(redis)
    unaware, aware = driver.workers[WorkerId("w1")], PagedWorker("w2", PAGES, 16, 64, tier_units=2, redis=redis)
    successor = Driver(workers=0, step_us=slow)
    for worker in (unaware, aware):
        worker.reconnect()
        successor.join(worker)
    assert not any(units.tier is Tier.REDIS for units in unaware.tiers())
    successor.lose(aware)
    assert ask(successor, "r") == REST


@pytest.mark.parametrize("other", [None, PagedRedis(100, layout="another")])
def test_a_worker_without_that_tier_or_with_another_layout_computes(other: PagedRedis | None) -> None:
    redis = PagedRedis(100)
    driver, _ = stored(redis)
    for worker in list(driver.workers.values()):
        driver.lose(worker)
    newcomer(driver, other, "w2")
    assert ask(driver, "r") == len(ASKED)
    assert not driver.finished["r"].timeline.transfers


def test_the_head_may_lie_in_a_tier_of_its_own_and_the_tail_in_redis() -> None:
    """Of a chain the tail leaves the host first."""
    redis = PagedRedis(100)
    driver, first = stored(redis)
    driver.lose(first)
    units = chain(ROOT, CACHED)
    heads = {unit: redis.units.pop(unit) for unit in units[:5]}
    second = driver.worker
    second._tiers._host.update(heads)
    driver.feed(second.event(TierUnits(Tier.HOST, list(heads))))
    driver.feed(second.event(TierUnits(Tier.REDIS, dropped=list(heads))))
    assert ask(driver, "r") == REST


def test_nothing_is_pulled_behind_a_page_whose_head_alone_is_there() -> None:
    """A page that cannot be shared is pulled whole, and its head lies in no tier."""
    redis = PagedRedis(100)
    driver, _ = stored(redis)
    for worker in list(driver.workers.values()):
        driver.lose(worker)
    only = newcomer(driver, redis, "w2", page_size=64)
    heads = chain(ROOT, CACHED)[:9]
    for unit in heads:
        del redis.units[unit]
    driver.feed(only.event(TierUnits(Tier.REDIS, dropped=heads)))
    assert ask(driver, "head", CACHED[:150]) == 150
    assert ask(driver, "r") == len(ASKED) - len(heads) * UNIT_TOKENS
    assert not driver.finished["r"].timeline.transfers


def test_a_worker_pulls_nothing_from_itself_that_lies_in_its_own_pages_alone() -> None:
    redis = PagedRedis(100)
    driver, first = stored(redis)
    driver.lose(first)
    units, worker = chain(ROOT, CACHED), driver.worker
    heads = {unit: redis.units[unit] for unit in units[:6]}
    for unit in units:
        del redis.units[unit]
    worker._tiers._host.update(heads)
    driver.feed(worker.event(TierUnits(Tier.HOST, list(heads))))
    driver.feed(worker.event(TierUnits(Tier.REDIS, dropped=units)))
    # As after the loss of a page at the head of a chain whose tail is left.
    driver.engine._placing.prefixes.twin.add(worker.info.worker_id, units[6:], Tier.DEVICE)
    assert ask(driver, "r") == len(ASKED) - 6 * UNIT_TOKENS
    (transfer,) = driver.finished["r"].timeline.transfers
    assert (transfer.num_units, transfer.failure) == (6, None)


@pytest.mark.parametrize("left", [0, 7])
def test_what_a_pull_finds_missing_is_forgotten_and_not_asked_for_again(left: int) -> None:
    redis = PagedRedis(100)
    driver, first = stored(redis)
    driver.lose(first)
    for unit in chain(ROOT, CACHED)[left:]:
        del redis.units[unit]
    assert ask(driver, "r") == len(ASKED) - left * UNIT_TOKENS
    (transfer,) = driver.finished["r"].timeline.transfers
    assert (transfer.num_units, transfer.failure) == (left, "test")
    assert not set(chain(ROOT, CACHED)[left:]) & set(
        driver.engine._placing.prefixes.shared.readable_by(driver.worker.info)
    )


def test_a_miss_in_redis_does_not_keep_a_worker_from_its_own_tiers() -> None:
    redis = PagedRedis(100)
    driver, first = stored(redis)
    driver.lose(first)
    for unit in chain(ROOT, CACHED):
        del redis.units[unit]
    ask(driver, "missed")
    ask(driver, "pushes it out", prompt(220, 4))
    assert set(chain(ROOT, CACHED)[4:]) <= redis.units.keys(), "by the one that is left"
    assert ask(driver, "r") < len(ASKED), "less than a distrusted pull's time later"


def test_a_failed_step_voids_what_its_worker_stored() -> None:
    driver, first = stored(PagedRedis(100))
    info = first.info
    del driver.workers[info.worker_id]
    driver.feed(StepReported(info.worker_id, info.epoch, StepReport(PlanId(1), 0, True, [], failure="boom")))
    assert not len(driver.engine._placing.prefixes.shared)
    assert ask(driver, "r") == len(ASKED)


def test_neither_the_twin_nor_the_index_says_anything_of_the_dead_and_no_audit_finds_drift() -> None:
    driver, first = stored(PagedRedis(100))
    driver.lose(first)
    driver.index_updates.clear()
    ask(driver, "r")
    assert driver.engine.twin.count(first.info.worker_id) == 0
    assert {update.worker_id for update in driver.index_updates} == {"w1"}
    second = driver.worker
    twin = driver.engine.twin.units(second.info.worker_id)
    held = {units.tier: set(units.stored) for units in second.tiers()}
    assert twin[Tier.HOST] == held.get(Tier.HOST, set()) and twin[Tier.REDIS] == held.get(Tier.REDIS, set())


def test_an_audit_tells_what_is_in_redis_as_well() -> None:
    driver, first = stored(PagedRedis(100))
    unit = UnitHash(b"u" * 32)
    shared = driver.engine._placing.prefixes.shared
    for held in ([unit], []):
        audit = ResidencyAudited(
            first.info.worker_id,
            first.info.epoch,
            first.residents(),
            [TierUnits(Tier.REDIS, held)],
            {Tier.REDIS: frozenset([unit])},
        )
        driver.feed(audit)
        assert (unit in shared.readable_by(first.info)) == bool(held)


# -- the table -----------------------------------------------------------------------------------------------------


def units(*numbers: int) -> list[UnitHash]:
    return [UnitHash(number.to_bytes(32)) for number in numbers]


def a_worker(tier: SharedTier | None) -> PagedWorker:
    redis = None if tier is None else PagedRedis(tier.max_units, tier.layout, tier.ttl_ms)
    return PagedWorker("w", 4, 16, 64, epoch=Epoch(1), redis=redis)


def test_the_table_never_holds_more_than_the_tiers_budget_and_lets_go_of_what_was_told_first() -> None:
    tier, shared = SharedTier("x", 3, 1000), SharedUnits()
    shared.changed(tier, TierUnits(Tier.REDIS, units(1, 2, 3)), now=0.0)
    shared.changed(tier, TierUnits(Tier.REDIS, units(1, 4)), now=0.1)
    assert list(shared.readable_by(a_worker(tier).info)) == units(3, 1, 4)


def test_what_is_older_than_its_ttl_is_forgotten_and_a_layout_without_units_too() -> None:
    tier, shared = SharedTier("x", 3, 1000), SharedUnits()
    shared.changed(tier, TierUnits(Tier.REDIS, units(1)), now=0.0)
    shared.changed(tier, TierUnits(Tier.REDIS, units(2)), now=0.5)
    shared.expire(now=1.2)
    assert list(shared.readable_by(a_worker(tier).info)) == units(2)
    shared.expire(now=1.6)
    assert not shared and not shared._layouts


def test_what_one_worker_saw_go_is_gone_for_all_of_its_layout() -> None:
    tier, other, shared = SharedTier("x", 3, 1000), SharedTier("y", 3, 1000), SharedUnits()
    for one in (tier, other):
        shared.changed(one, TierUnits(Tier.REDIS, units(1, 2)), now=0.0)
    shared.changed(tier, TierUnits(Tier.REDIS, [], units(1)), now=0.1)
    assert list(shared.readable_by(a_worker(tier).info)) == units(2)
    assert list(shared.readable_by(a_worker(other).info)) == units(1, 2)
    assert list(shared.readable_by(a_worker(None).info)) == []


def test_a_pull_that_failed_for_another_reason_says_nothing_of_redis() -> None:
    tier, shared = SharedTier("x", 3, 1000), SharedUnits()
    shared.changed(tier, TierUnits(Tier.REDIS, units(2, 3)), now=0.0)
    worker = a_worker(tier).info
    assert not shared.missing(worker, units(1, 2, 3)) and list(shared.readable_by(worker)) == units(2, 3)
    assert shared.missing(worker, units(2, 3)) and not shared
