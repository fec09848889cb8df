"""Tells the cell where this worker listens, again with every heartbeat, and takes it back at the end.

A scheduler finds workers here; whether one really lives it learns from the session itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prometheus_client import Counter
from redis.asyncio import Redis
from redis.exceptions import RedisError

from wire import keys
from wire.entries import WorkerEntry
from wire.ids import Epoch

log = logging.getLogger("gpu_worker.registration")

_FIRST_RETRY_S = 0.1
_REMOVE_TIMEOUT_S = 1.0
_AWAY = (RedisError, OSError, TimeoutError)
"""What a Redis that is gone, starting or failing over raises."""


async def keep_registered(
    redis: Redis, cell: str, current_entry: Callable[[], WorkerEntry], *, reconnects: Counter
) -> None:
    """Register now and every HEARTBEAT_S; runs until cancelled, then removes the registration.

    While Redis is away, retries with backoff up to HEARTBEAT_S; `reconnects` counts each time it came back.
    """
    retry_s = _FIRST_RETRY_S
    away = False
    try:
        while True:
            try:
                await _register(redis, cell, current_entry())
            except _AWAY as error:
                if not away:
                    log.warning("Redis is away; retrying", extra={"error": repr(error)})
                away = True
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, keys.HEARTBEAT_S)
                continue
            if away:
                log.info("Redis is back")
                reconnects.inc()
                away, retry_s = False, _FIRST_RETRY_S
            await asyncio.sleep(keys.HEARTBEAT_S)
    finally:
        await _remove(redis, cell, current_entry())


async def _register(redis: Redis, cell: str, entry: WorkerEntry) -> None:
    """Lease in the cell's set of workers; with the same lifetime the entry and the index of its KV. One transaction."""
    key = keys.worker(cell, entry.worker_id)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.zadd(keys.workers(cell), {entry.worker_id: time.time() + keys.WORKER_LEASE_TTL_S})
        pipe.hset(key, mapping=entry.encode())  # type: ignore[arg-type]  # redis-py's mapping type is invariant
        for leased in (key, _prefixes(cell, entry)):
            pipe.pexpire(leased, int(keys.WORKER_LEASE_TTL_S * 1000))
        await pipe.execute()


async def _remove(redis: Redis, cell: str, entry: WorkerEntry) -> None:
    try:
        async with asyncio.timeout(_REMOVE_TIMEOUT_S), redis.pipeline(transaction=True) as pipe:
            pipe.zrem(keys.workers(cell), entry.worker_id)
            pipe.unlink(keys.worker(cell, entry.worker_id), _prefixes(cell, entry))
            await pipe.execute()
    except _AWAY as error:
        log.warning("not removed from Redis; the lease will lapse", extra={"error": repr(error)})


def _prefixes(cell: str, entry: WorkerEntry) -> str:
    return keys.prefixes(cell, entry.worker_id, Epoch(entry.epoch))
