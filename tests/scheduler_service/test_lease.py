from __future__ import annotations

import asyncio
import time

import pytest
from redis.asyncio import Redis

from scheduler.lease import Lease
from tests.scheduler_service.parts import CELL
from wire import keys
from wire.errors import FenceLost

TTL_S = 0.6


def lease(redis: Redis, holder: str) -> Lease:
    return Lease(redis, CELL, holder, ttl_s=TTL_S)


async def test_a_successor_waits_for_a_dead_holder_at_most_the_ttl_and_fences_it(redis: Redis) -> None:
    first, second = lease(redis, "first"), lease(redis, "second")
    await first.acquire()
    died_s = time.monotonic()
    await asyncio.wait_for(second.acquire(), 5)
    assert TTL_S / 2 < time.monotonic() - died_s < TTL_S + 3.0
    assert second.fence > first.fence
    with pytest.raises(FenceLost):
        await first.confirm()


async def test_a_standby_waits_as_long_as_the_lease_is_kept(redis: Redis) -> None:
    first, second = lease(redis, "first"), lease(redis, "second")
    await first.acquire()
    keeping = asyncio.create_task(first.keep())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(second.acquire(), 2 * TTL_S)
    keeping.cancel()
    await first.release()
    await asyncio.wait_for(second.acquire(), 0.4)


async def test_keep_ends_when_another_took_the_lease(redis: Redis) -> None:
    first, second = lease(redis, "first"), lease(redis, "second")
    await first.acquire()
    await redis.delete(keys.lease(CELL))
    await second.acquire()
    with pytest.raises(FenceLost):
        await asyncio.wait_for(first.keep(), 5)
    await second.confirm()


@pytest.mark.parametrize("lost", [[keys.lease(CELL)], [keys.lease(CELL), keys.fence(CELL)]])
async def test_a_lease_that_redis_lost_is_taken_up_again_if_nobody_came_between(redis: Redis, lost: list[str]) -> None:
    ours = lease(redis, "ours")
    fence = await ours.acquire()
    await redis.delete(*lost)
    await ours.confirm()
    assert ours.fence == fence
    assert await redis.get(keys.fence(CELL)) == str(fence).encode()
    assert await redis.get(keys.lease(CELL)) == b"ours"


async def test_a_fence_is_higher_than_all_before_even_if_redis_lost_everything(redis: Redis) -> None:
    fences = []
    for round_ in range(3):
        holder = lease(redis, f"holder {round_}")
        fences.append(await holder.acquire())
        await holder.release()
    await redis.flushall()
    await asyncio.sleep(0.05)  # a restart takes longer: fences never run ahead of the milliseconds for long
    fences.append(await lease(redis, "stranger").acquire())
    assert fences == sorted(set(fences))


async def test_release_leaves_a_lease_of_another_alone(redis: Redis) -> None:
    first, second = lease(redis, "first"), lease(redis, "second")
    await first.acquire()
    await redis.delete(keys.lease(CELL))
    await second.acquire()
    await first.release()
    await second.confirm()


@pytest.mark.parametrize("junk", ["junk", "", "-1", "0x7fffffffffffffff", "1e400", "nan", "9" * 16, "9" * 30])
async def test_a_fence_that_is_junk_is_overwritten_and_the_lease_taken_at_once(redis: Redis, junk: str) -> None:
    before_ms = time.time() * 1000
    await redis.set(keys.fence(CELL), junk)
    ours = lease(redis, "ours")
    fence = await asyncio.wait_for(ours.acquire(), TTL_S / 2)
    assert before_ms <= fence <= time.time() * 1000 + 2
    assert await redis.get(keys.fence(CELL)) == str(fence).encode()
    await ours.confirm()


async def test_a_fence_of_another_type_is_overwritten(redis: Redis) -> None:
    await redis.lpush(keys.fence(CELL), "x")
    ours = lease(redis, "ours")
    await asyncio.wait_for(ours.acquire(), TTL_S / 2)
    await ours.confirm()


async def test_junk_in_the_fence_ends_the_tenure_and_the_holder_follows_itself_at_once(redis: Redis) -> None:
    ours = lease(redis, "ours")
    first = await ours.acquire()
    await redis.set(keys.fence(CELL), "junk")
    with pytest.raises(FenceLost):
        await ours.confirm()
    assert await asyncio.wait_for(ours.acquire(), TTL_S / 2) > first
