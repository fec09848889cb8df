"""A Redis per test, and what the scheduler's parts need to be built one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.redis_fixture import RedisServer, durable_redis_server, redis_server
from tests.scheduler_service.parts import Parts
from wire.redis_client import open_redis

__all__ = ["durable_redis_server", "redis_server"]


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with open_redis(redis_server.url) as client:
        yield client


@pytest.fixture
async def parts(redis_server: RedisServer, redis: Redis) -> AsyncIterator[Parts]:
    built = Parts(redis_server.url, redis)
    await built.lease.acquire()
    built.build()
    yield built
    await built.aclose()
