"""The gateway's own bounds on Redis: clients wait for an answer, so it gives up sooner than other services."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from wire import redis_client

CONNECT_TIMEOUT_S = 1.0
COMMAND_TIMEOUT_S = 2.0

REDIS_ERRORS = (RedisError, OSError)
"""Redis is away, still loading, or out of memory: for a request all the same."""


def refused(error: Exception) -> bool:
    """Redis is there and answered with an error (a key of the wrong type, no memory left): waiting is no remedy."""
    return isinstance(error, ResponseError)


def open_redis(url: str, *, cell: str | None = None) -> Redis:
    """Raises ConfigInvalid for a malformed URL; commands raise one of REDIS_ERRORS within the bounds."""
    return redis_client.open_redis(
        url, cell=cell, command_timeout_s=COMMAND_TIMEOUT_S, connect_timeout_s=CONNECT_TIMEOUT_S
    )
