"""How the scheduler lives with a Redis that may be away: patience lives here and nowhere else."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError, ResponseError

from wire import keys

REDIS_ERRORS: Final = (RedisError, OSError)
"""What an absent, restarting or overloaded Redis raises."""
BLOCK_MS: Final = 1000
"""Blocking reads return this often; well inside the client's timeout."""
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
MAX_REFUSED_KEYS: Final = 1024
_OF_THE_SERVER: Final = frozenset(
    {"LOADING", "READONLY", "MISCONF", "OOM", "NOREPLICAS", "BUSY", "NOAUTH", "NOPERM", "NOSCRIPT", "EXECABORT"}
    | {"MASTERDOWN", "CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN", "MOVED", "ASK"}
)
"""Codes of errors that say nothing about the key of a command, and pass."""


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


def is_of_its_key(error: ResponseError) -> bool:
    """Whether Redis refused a command for what its key holds (WRONGTYPE, …): then so it does the next time."""
    # Before Redis 7 the code of an error inside a script stands somewhere in the text.
    return _OF_THE_SERVER.isdisjoint(re.findall("[A-Z]+", f"{error.status_code} {error}"))


async def execute_each(pipe: Pipeline) -> list[Any]:
    """Results of a pipeline's commands, as of each_of_its_key. Raises redis-py's errors."""
    return each_of_its_key(await pipe.execute(raise_on_error=False))


def each_of_its_key(results: list[Any]) -> list[Any]:
    """The same; a ResponseError among them is the result of a command whose key is at fault.

    Raises what concerns the server: then any part of it may be done or not.
    """
    for result in results:
        if isinstance(result, ResponseError) and not is_of_its_key(result):
            raise result
    return results


class RefusedKeys:
    """Says once per key that Redis refuses our commands there, so that they are dropped."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._known: set[str] = set()

    def note(self, key: str, result: Any) -> bool:
        """Take one of each_of_its_key's results; returns whether it is a refusal."""
        if not isinstance(result, ResponseError):
            self._known.discard(key)
            return False
        if key not in self._known:
            if len(self._known) >= MAX_REFUSED_KEYS:
                self._known.clear()  # full → forgotten, and said again
            self._known.add(key)
            self._log.error("Redis refuses %s, dropped: %s", key, result, extra={"key": key})
        return True


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
