"""A worker's registration, in a real Redis."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import cast

import pytest
from redis.asyncio import Redis

from gpu_worker.registration import keep_registered
from observability.metrics import WorkerMetrics
from tests.redis_fixture import RedisServer
from wire import keys
from wire.entries import WorkerEntry
from wire.ids import Epoch, WorkerId
from wire.redis_client import open_redis

TIMEOUT_S = 10.0
CELL = "registration"
ENTRY = WorkerEntry(WorkerId("w1"), "127.0.0.1:4242", 7, 1234)


@pytest.fixture
async def redis(durable_redis_server: RedisServer) -> AsyncIterator[Redis]:
    """The test's own client."""
    async with Redis.from_url(durable_redis_server.url) as client:
        yield client


@asynccontextmanager
async def registered(server: RedisServer, entries: Iterator[WorkerEntry]) -> AsyncIterator[WorkerMetrics]:
    metrics = WorkerMetrics()
    async with open_redis(server.url) as redis:
        task = asyncio.ensure_future(
            keep_registered(redis, CELL, lambda: next(entries), reconnects=metrics.redis_reconnects)
        )
        try:
            yield metrics
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=TIMEOUT_S)
            assert task.cancelled()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110  # Redis has no event for it
            await asyncio.sleep(0.01)


def constant() -> Iterator[WorkerEntry]:
    while True:
        yield ENTRY


async def lapses_at(redis: Redis) -> float:
    """Unix time the worker's lease lapses; 0 when it is not listed."""
    return await redis.zscore(keys.workers(CELL), "w1") or 0.0


async def is_listed(redis: Redis) -> bool:
    return await lapses_at(redis) > 0


async def stored_entry(redis: Redis) -> WorkerEntry:
    raw = await redis.hgetall(keys.worker(CELL, ENTRY.worker_id))
    return WorkerEntry.decode(cast(dict[bytes, bytes], raw))


async def test_a_worker_is_found_with_a_lease_and_gone_after_a_clean_stop(
    redis: Redis, durable_redis_server: RedisServer
) -> None:
    async with registered(durable_redis_server, constant()):
        await until(lambda: is_listed(redis))
        assert await lapses_at(redis) == pytest.approx(time.time() + keys.WORKER_LEASE_TTL_S, abs=2.0)
        assert await stored_entry(redis) == ENTRY
        assert 0 < await redis.pttl(keys.worker(CELL, ENTRY.worker_id)) <= keys.WORKER_LEASE_TTL_S * 1000
    assert await redis.keys("*") == []


async def test_heartbeats_keep_the_index_of_this_epoch_alive_and_a_clean_stop_removes_it(
    redis: Redis, durable_redis_server: RedisServer
) -> None:
    indexed, earlier = (keys.prefixes(CELL, ENTRY.worker_id, Epoch(epoch)) for epoch in (ENTRY.epoch, ENTRY.epoch - 1))
    for key in (indexed, earlier):
        await redis.hset(key, "unit", "d")
        await redis.pexpire(key, 100_000)

    async def renewed() -> bool:
        return await redis.pttl(indexed) <= keys.WORKER_LEASE_TTL_S * 1000

    async with registered(durable_redis_server, constant()):
        await until(renewed)
        assert await redis.pttl(earlier) > keys.WORKER_LEASE_TTL_S * 1000
    assert await redis.keys("*") == [earlier.encode()]


async def test_heartbeats_renew_the_lease_and_carry_a_new_epoch(
    redis: Redis, durable_redis_server: RedisServer
) -> None:
    def epochs() -> Iterator[WorkerEntry]:
        epoch = 7
        while True:
            yield WorkerEntry(ENTRY.worker_id, ENTRY.address, epoch, ENTRY.pid)
            epoch += 1

    async def in_epoch_8() -> bool:
        return (await stored_entry(redis)).epoch == 8

    async with registered(durable_redis_server, epochs()):
        await until(lambda: is_listed(redis))
        first = await lapses_at(redis)
        await until(in_epoch_8)
        assert await lapses_at(redis) >= first + keys.HEARTBEAT_S


async def test_registration_outlives_redis(durable_redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu_worker.registration")

    async def logged(message: str) -> bool:
        return message in caplog.text

    async with registered(durable_redis_server, constant()) as metrics:
        async with Redis.from_url(durable_redis_server.url) as redis:
            await until(lambda: is_listed(redis))
            before = await lapses_at(redis)
        durable_redis_server.kill()
        await until(lambda: logged("Redis is away"))
        durable_redis_server.start()
        await until(lambda: logged("Redis is back"))
        async with Redis.from_url(durable_redis_server.url) as redis:
            assert await lapses_at(redis) > before
    assert metrics.registry.get_sample_value("phasemesh_redis_reconnects_total") == 1


async def test_a_clean_stop_does_not_wait_for_a_redis_that_is_away(
    redis: Redis, durable_redis_server: RedisServer
) -> None:
    async with registered(durable_redis_server, constant()):
        await until(lambda: is_listed(redis))
        durable_redis_server.kill()
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 2.0
