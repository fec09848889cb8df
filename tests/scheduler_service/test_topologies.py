"""Scheduler, worker and gateway on a Cluster and behind Sentinels, before and after their keys have moved."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from kvstore.prefix_index import Holder
from kvstore.redis_prefix_index import RedisPrefixIndex
from tests.redis_topology import Cluster, Watched, cluster, watched
from tests.scheduler_service.client import gateway
from tests.scheduler_service.parts import CELL, GATEWAY, is_closed, request_entry, until
from tests.scheduler_service.scripted_worker import ScriptedWorker, register, serve
from tests.scheduler_service.test_scheduler import scheduler
from wire import keys
from wire.redis_client import open_redis

PROMPT = [2 + i % 40 for i in range(80)]


async def serves(where: Cluster | Watched, request_id: str) -> None:
    """A whole life of a cell: one request is answered, and the index in Redis knows its prompt afterwards."""
    worker = ScriptedWorker()
    async with open_redis(where.url, cell=CELL) as redis, serve(worker), gateway(where.url) as client:
        await register(redis, CELL, worker)
        async with scheduler(where):
            await (await client.submit(request_entry(request_id, PROMPT))).finished_right()
            await until(lambda: is_closed(redis, request_id))
            index = RedisPrefixIndex(redis, CELL)
            info = worker.paged.info
            holder = Holder(info.worker_id, info.epoch)

            async def indexed() -> bool:
                return bool([part async for part in index.units(holder)])

            await until(indexed)
        await redis.delete(keys.workers(CELL), keys.replies(CELL, GATEWAY))  # the next client reads from the start


async def test_a_cell_lives_on_a_cluster_and_moves_with_its_slot(tmp_path: Path) -> None:
    with cluster(tmp_path) as nodes:
        await serves(nodes, "before")
        async with open_redis(nodes.url, cell=CELL) as client:
            redis: Any = client
            slot: int = await redis.execute_command("CLUSTER", "KEYSLOT", keys.live(CELL))
        source = await asyncio.to_thread(nodes.owner, slot)
        target = next(node for node in nodes.nodes if node is not source)
        await asyncio.to_thread(nodes.move_slot, slot, source, target)
        await serves(nodes, "after")


async def test_a_cell_lives_behind_sentinels_through_a_failover(tmp_path: Path) -> None:
    with watched(tmp_path) as pair:
        await serves(pair, "before")
        await asyncio.to_thread(pair.fail_over)
        await serves(pair, "after")
