from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from scheduler import gateway_watch
from scheduler.events import CancelRequested
from scheduler.gateway_watch import GatewayWatch
from scheduler.pending import PendingRequest
from tests.redis_fixture import RedisServer
from tests.scheduler_service.parts import CELL, GATEWAY, Parts, request_entry
from wire import keys
from wire.ids import GatewayId, RequestId

GRACE_S = 0.4


@pytest.fixture
async def watch(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Running, with a request of GATEWAY and one of another pending."""
    monkeypatch.setattr(gateway_watch, "CHECK_S", 0.05)
    for name, gateway_id in (("r", GATEWAY), ("other", GatewayId("alive"))):
        entry = request_entry(name, gateway_id=gateway_id)
        parts.pending.add(PendingRequest(entry, "interactive", b"1-0"))
    await parts.redis.zadd(keys.gateways(CELL), {"alive": parts.clock.now() + 60})
    task = asyncio.create_task(
        GatewayWatch(parts.redis, CELL, parts.pending, parts.inbox, parts.clock, grace_s=GRACE_S).run()
    )
    yield
    task.cancel()
    await asyncio.wait([task])


async def set_lease(parts: Parts, lapses_in_s: float) -> None:
    await parts.redis.zadd(keys.gateways(CELL), {GATEWAY: parts.clock.now() + lapses_in_s})


async def cancelled_after(parts: Parts) -> float:
    began_s = parts.clock.now()
    assert await asyncio.wait_for(parts.inbox.get(), 5) == CancelRequested(RequestId("r"), "gateway_lost")
    return parts.clock.now() - began_s


@pytest.mark.parametrize("lapses_in_s", [0.2, None])
async def test_requests_of_a_lost_gateway_are_cancelled_after_the_grace(
    parts: Parts, watch: None, lapses_in_s: float | None
) -> None:
    if lapses_in_s is not None:
        await set_lease(parts, lapses_in_s)
    assert await cancelled_after(parts) >= GRACE_S + (lapses_in_s or 0.0) - 0.1


async def test_a_gateway_that_comes_back_in_time_loses_nothing(parts: Parts, watch: None) -> None:
    await set_lease(parts, 0.1)
    await asyncio.sleep(GRACE_S / 2)
    await set_lease(parts, 60)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(parts.inbox.get(), 2 * GRACE_S)


async def test_time_without_redis_does_not_count(
    parts: Parts, watch: None, durable_redis: None, redis_server: RedisServer
) -> None:
    await set_lease(parts, 0.1)
    redis_server.kill()
    await asyncio.sleep(2 * GRACE_S)
    redis_server.start()
    assert await cancelled_after(parts) > GRACE_S / 2


@pytest.fixture
async def durable_redis(parts: Parts) -> None:
    """Keeps what is written over a kill."""
    await parts.redis.config_set("appendonly", "yes")
    await parts.redis.config_set("appendfsync", "always")
