"""Roles changed at run time: what the engine is told, in which order, whatever Redis and the workers do."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.events import RoleChanged
from scheduler.role_wishes import RoleWishes
from scheduler.worker_registry import POLL_S, WorkerRegistry
from tests.redis_fixture import RedisServer
from tests.scheduler_service.parts import CELL, Parts
from tests.scheduler_service.scripted_worker import ScriptedWorker, register, serve
from tests.scheduler_service.test_worker_link import W1, next_event, registry, worker_down, worker_up
from wire import keys
from wire.ids import WorkerId
from wire.plan import Role

__all__ = ["registry"]


async def nothing_more(parts: Parts) -> None:
    """Over several polls."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(parts.inbox.get(), 3 * POLL_S)


async def test_a_wish_is_told_once_and_again_when_it_changes(parts: Parts, registry: WorkerRegistry) -> None:
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        assert (await worker_up(parts)).info.role is Role.BOTH
        await nothing_more(parts)
        await parts.redis.hset(keys.roles(CELL), W1, Role.PREFILL)
        assert await next_event(parts, RoleChanged) == RoleChanged(W1, Role.PREFILL)
        await nothing_more(parts)
        await parts.redis.hset(keys.roles(CELL), W1, Role.DECODE)
        assert await next_event(parts, RoleChanged) == RoleChanged(W1, Role.DECODE)


async def test_a_wish_that_is_taken_back_leaves_the_workers_own_role(parts: Parts, registry: WorkerRegistry) -> None:
    await parts.redis.hset(keys.roles(CELL), W1, Role.PREFILL)
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        assert await next_event(parts, RoleChanged) == RoleChanged(W1, Role.PREFILL)
        await parts.redis.delete(keys.roles(CELL))
        assert await next_event(parts, RoleChanged) == RoleChanged(W1, Role.BOTH)
        await nothing_more(parts)


async def test_a_wish_outlives_the_session_and_follows_each_worker_up(parts: Parts, registry: WorkerRegistry) -> None:
    await parts.redis.hset(keys.roles(CELL), W1, Role.DECODE)
    for epoch in (1, 2):
        worker = ScriptedWorker(epoch=epoch)
        async with serve(worker) as server:
            await register(parts.redis, CELL, worker)
            assert (await worker_up(parts)).info.epoch == epoch
            assert await next_event(parts, RoleChanged) == RoleChanged(W1, Role.DECODE)
            await server.stop(None)
            await worker_down(parts)


async def test_a_wish_for_a_worker_that_is_gone_and_one_that_is_no_role_are_harmless(
    parts: Parts, registry: WorkerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    await parts.redis.hset(keys.roles(CELL), mapping={"gone": Role.PREFILL, W1: b"\xffboss"})
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        await nothing_more(parts)
    assert caplog.text.count("not one of prefill, decode, both") == 1


async def test_a_key_that_holds_something_else_does_not_stop_the_registry(
    parts: Parts, registry: WorkerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    await parts.redis.set(keys.roles(CELL), "text")
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        await nothing_more(parts)
    assert caplog.text.count(f"Redis refuses {keys.roles(CELL)}") == 1


async def test_while_redis_is_away_the_last_wish_holds(
    parts: Parts, registry: WorkerRegistry, redis_server: RedisServer
) -> None:
    await parts.redis.hset(keys.roles(CELL), W1, Role.PREFILL)
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        await next_event(parts, RoleChanged)
        redis_server.kill()
        await nothing_more(parts)


def test_nothing_is_told_of_a_worker_that_the_engine_does_not_know() -> None:
    wishes = RoleWishes()
    wishes.read([WorkerId("w9")], [b"prefill"])
    assert wishes.change(WorkerId("w9")) is None
