"""How the scheduler lives with a Redis that may be away: patience lives here and nowhere else."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from wire import keys

REDIS_ERRORS: Final = (RedisError, OSError)
"""What an absent, restarting or overloaded Redis raises."""
BLOCK_MS: Final = 1000
"""Blocking reads return this often; well inside the client's timeout."""
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0


class Patience:
    """One task's way through an outage: says once that it began and once that it ended, and waits between tries."""

    def __init__(self, log: logging.Logger, doing: str) -> None:
        self._log = log
        self._doing = doing
        self._pause_s = 0.0

    async def after(self, error: BaseException) -> None:
        """Wait before the next try: 50 ms, doubling to 1 s."""
        if self._pause_s == 0.0:
            self._log.warning("%s failed, trying on: %r", self._doing, error)
        self._pause_s = min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        await asyncio.sleep(self._pause_s)

    def success(self) -> None:
        if self._pause_s:
            self._log.info("%s works again", self._doing)
        self._pause_s = 0.0


def decoded(members: Any) -> list[str]:
    """Members of a set, as text; one that is not UTF-8 is none of ours. redis-py types them by everything there is."""
    names = []
    for member in members:
        with suppress(UnicodeDecodeError):
            names.append(member.decode())
    return names


async def ensure_groups(redis: Redis, streams: list[str]) -> None:
    """Create the scheduler's consumer group on each stream, from its first entry on, unless it is there."""
    for stream in streams:
        try:
            await redis.xgroup_create(stream, keys.SCHEDULER_GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
