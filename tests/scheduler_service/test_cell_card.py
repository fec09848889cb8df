from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from prometheus_client import generate_latest

from gateway.cell import CellWatch
from kvstore.page_pool import PoolCounts
from scheduler.cell_card import PUBLISH_S, CellCardPublisher
from scheduler.lease import Lease
from scheduler.stats import EngineStats, WorkerStats
from tests.engine.paged_worker import CARD
from tests.scheduler_service.parts import CELL, GATEWAY, Parts, until
from wire import keys
from wire.entries import CellCard, CellWorker
from wire.ids import WorkerId
from wire.plan import ModelCard, Role


def stats(num_workers: int, model: ModelCard | None = CARD) -> EngineStats:
    pages = PoolCounts(free=5, cached=2, in_use=3, retiring=0)
    roles = (Role.BOTH, Role.DECODE)
    workers = [WorkerStats(WorkerId(f"w{i}"), 1, 10, pages, roles[i], num_pulling=i) for i in range(num_workers)]
    return EngineStats(4, num_workers, 0, 0, workers, model, 161, 2.5)


class Shown:
    """Runs the publisher over stats that the test sets."""

    def __init__(self, parts: Parts, now: EngineStats) -> None:
        self.now = now
        self.parts = parts
        self.publisher = CellCardPublisher(parts.redis, CELL, parts.lease, lambda: self.now, parts.metrics)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.publisher.run())
        yield
        task.cancel()
        await asyncio.wait([task])

    async def card(self) -> CellCard | None:
        raw = await self.parts.redis.hgetall(keys.cell_card(CELL))
        return CellCard.decode(raw) if raw else None

    async def shows(self, num_workers: int) -> bool:
        card = await self.card()
        return card is not None and card.num_workers == num_workers


async def test_the_card_says_what_gateways_admit_by_and_lapses_with_its_scheduler(parts: Parts) -> None:
    shown = Shown(parts, stats(2))
    async with shown.running():
        await until(lambda: shown.shows(2))
    workers = [CellWorker(WorkerId("w0"), Role.BOTH, 1), CellWorker(WorkerId("w1"), Role.DECODE, 1)]
    assert await shown.card() == CellCard("model", "r0", 50, 400, 161, [1], 2, parts.fence, 2.5, workers)
    assert 0 < await parts.redis.pttl(keys.cell_card(CELL)) <= keys.SCHEDULER_LEASE_TTL_S * 1000


async def test_a_change_of_workers_is_published_at_once(parts: Parts) -> None:
    shown = Shown(parts, stats(1))
    async with shown.running():
        await until(lambda: shown.shows(1))
        shown.now = stats(0)
        shown.publisher.workers_changed()
        await until(lambda: shown.shows(0), timeout_s=0.3)


async def test_before_any_worker_has_come_the_card_says_that_none_is_up(parts: Parts) -> None:
    shown = Shown(parts, stats(0, model=None))
    async with shown.running():
        await until(lambda: shown.shows(0))
    card = await shown.card()
    assert card is not None and card.model_name == "" and card.fence == parts.fence
    watch = CellWatch(parts.redis, CELL, GATEWAY, "model", 10.0)
    await watch.look()
    assert watch.problem == "no worker is up"


async def test_a_predecessors_card_stands_until_workers_came_over_or_it_lapses(parts: Parts) -> None:
    before = Shown(parts, stats(2))
    async with before.running():
        await until(lambda: before.shows(2))
    await parts.redis.pexpire(keys.cell_card(CELL), 800)
    shown = Shown(parts, stats(0, model=None))
    async with shown.running():
        await asyncio.sleep(0.1)
        assert await shown.shows(2)
        await until(lambda: shown.shows(0), timeout_s=2)
        await asyncio.sleep(2 * PUBLISH_S)
        assert await parts.redis.pttl(keys.cell_card(CELL)) > 2000, "and ours is kept up"
        shown.now = stats(1)
        shown.publisher.workers_changed()
        await until(lambda: shown.shows(1))


async def test_a_fenced_out_scheduler_leaves_the_card_alone(parts: Parts) -> None:
    await parts.redis.delete(keys.lease(CELL))
    await Lease(parts.redis, CELL, "usurper").acquire()
    shown = Shown(parts, stats(1))
    async with shown.running():
        await asyncio.sleep(0.1)
        assert await shown.card() is None


async def test_gauges_show_the_engine_and_forget_lost_workers(parts: Parts) -> None:
    shown = Shown(parts, stats(2))
    async with shown.running():
        await until(lambda: shown.shows(2))
        scrape = generate_latest(parts.metrics.registry).decode()
        assert 'vllm:num_requests_waiting{model_name="model"} 4.0' in scrape
        assert 'phasemesh_scheduler_worker_sequences{role="decode",worker="w1"} 1.0' in scrape
        assert 'phasemesh_scheduler_pulls_in_flight{worker="w1"} 1.0' in scrape
        assert [f'phasemesh_scheduler_workers{{role="{role}"}} 1.0' in scrape for role in Role] == [False, True, True]
        shown.now = stats(1)
        shown.publisher.workers_changed()
        await until(lambda: shown.shows(1))
        assert 'worker="w1"' not in generate_latest(parts.metrics.registry).decode()


async def test_a_scheduler_that_is_not_active_any_more_has_no_gauges(parts: Parts) -> None:
    shown = Shown(parts, stats(2))
    async with shown.running():
        await until(lambda: shown.shows(2))
    scrape = generate_latest(parts.metrics.registry).decode()
    assert all(f'phasemesh_scheduler_workers{{role="{role}"}} 0.0' in scrape for role in Role)
    assert 'worker="' not in scrape
    assert "vllm:num_requests_waiting{" not in scrape and "vllm:num_requests_running{" not in scrape


async def test_a_worker_whose_role_changed_is_shown_under_the_new_one_only(parts: Parts) -> None:
    shown = Shown(parts, stats(1))
    async with shown.running():
        await until(lambda: shown.shows(1))
        shown.now = replace(shown.now, workers=[replace(shown.now.workers[0], role=Role.PREFILL)])
        shown.publisher.workers_changed()
        await until(lambda: in_role(shown, Role.PREFILL))
        scrape = generate_latest(parts.metrics.registry).decode()
    assert 'phasemesh_scheduler_worker_sequences{role="prefill",worker="w0"} 1.0' in scrape
    assert scrape.count("phasemesh_scheduler_worker_sequences{") == 1


async def in_role(shown: Shown, role: Role) -> bool:
    card = await shown.card()
    return card is not None and card.workers[0].role is role


async def test_the_gauges_of_a_model_end_with_it(parts: Parts) -> None:
    shown = Shown(parts, stats(1))
    async with shown.running():
        await until(lambda: shown.shows(1))
        shown.now = stats(2, replace(CARD, name="next"))
        shown.publisher.workers_changed()
        await until(lambda: shown.shows(2))
        scrape = generate_latest(parts.metrics.registry).decode()
    assert 'requests_waiting{model_name="next"} 4.0' in scrape
    assert 'requests_waiting{model_name="model"}' not in scrape
