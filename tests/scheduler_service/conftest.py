"""A Redis per test, and what the scheduler's parts need to be built one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.redis_fixture import RedisServer
from tests.scheduler_service.parts import Parts
from wire.redis_client import open_redis


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Forgets everything when it is killed: the harder case."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def durable_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """Keeps its data over a kill, but for the last second at most."""
    server = RedisServer(tmp_path, append_only=True)
    server.start()
    try:
        yield server
    finally:
        server.kill()


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
