"""Connections to Redis that answer or fail within a bound, so that no request ever hangs on Redis."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 2.0

REDIS_ERRORS = (RedisError, OSError)
"""Redis is away, still loading, out of memory, or answers nonsense: for a request all the same."""


def open_redis(url: str, *, command_timeout_s: float = COMMAND_TIMEOUT_S) -> Redis:
    """A client that connects on its first command, gives bytes back, and never retries by itself."""
    return Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=command_timeout_s,
        retry=Retry(NoBackoff(), 0),
    )
