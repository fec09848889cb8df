"""Connections to Redis, and the bound on every command, so that no request ever hangs on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 2.0

REDIS_ERRORS = (RedisError, OSError)
"""Redis is away (TimeoutError is an OSError), still loading, or out of memory: for a request all the same."""

T = TypeVar("T")


def open_redis(url: str) -> Redis:
    """A client that connects on its first command, gives bytes back, and never retries by itself.

    Its own socket_timeout stays off: it bounds writes with asyncio.wait_for, which on Python 3.11 swallows a
    cancellation that arrives as the write ends. Commands go through `bounded` instead.
    """
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=None,
        retry=Retry(NoBackoff(), 0),
    )


async def bounded(command: Awaitable[T]) -> T:
    """A command's reply. Raises one of REDIS_ERRORS, TimeoutError after COMMAND_TIMEOUT_S among them."""
    async with asyncio.timeout(COMMAND_TIMEOUT_S):
        return await command
