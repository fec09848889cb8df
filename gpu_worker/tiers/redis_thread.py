"""The cell's Redis for callers that are threads: an event loop in a thread of its own, with a client of its own.

No value of megabytes stands before a heartbeat, and Sentinels and Clusters are found as by every other client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis

from wire.redis_client import open_redis

T = TypeVar("T")

TIMEOUT_S = 1.0
"""To connect, and for each command: whoever asks waits so long at most before Redis counts as away."""


class RedisThread:
    """Lives from its construction to close(). Raises ConfigInvalid for a URL that cannot be."""

    def __init__(self, url: str, *, cell: str) -> None:
        self._client = open_redis(url, cell=cell, command_timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="kv-redis-client", daemon=True)
        self._thread.start()

    def ask(self, question: Callable[[Redis], Awaitable[T]]) -> T:
        """Run `question` in the loop and wait for its answer. Raises what it raises, or TimeoutError."""

        async def answer() -> T:
            async with asyncio.timeout(2 * TIMEOUT_S):  # to connect, then to command
                return await question(self._client)

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result()

    def close(self) -> None:
        """Nobody may ask any more."""
        asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
