"""Where a worker's KV lies, as the index in Redis says, and how a test moves it down the tiers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from kvstore.prefix_hash import chain, namespace, root_hash
from kvstore.prefix_index import TIERS_OF, Tiers
from tests.mesh.client import complete
from tests.mesh.stack import MeshStack, Service
from wire import keys
from wire.entries import CellCard, WorkerEntry
from wire.ids import Epoch, UnitHash, WorkerId
from wire.plan import ModelCard, Tier
from wire.redis_client import open_redis

CELL = "default"
MAX_FILLERS = 100


class UnitIndex:
    """Of the first worker of a mesh; its KV is float32."""

    def __init__(self, stack: MeshStack, session: aiohttp.ClientSession, *, filler_tokens: int) -> None:
        """filler_tokens: of each prompt that takes others' room; no more of their units may leave host memory at once
        than it has slots for."""
        self._stack = stack
        self._session = session
        self._filler_tokens = filler_tokens
        self._worker_id = WorkerId(stack.workers[0].name)

    async def units(self, prompt: Sequence[int], salt: str) -> list[UnitHash]:
        """The prompt's full ones."""
        redis: Any  # redis-py types a reply by everything any server may say
        async with open_redis(self._stack.redis.url) as redis:
            cell = CellCard.decode(await redis.hgetall(keys.cell_card(CELL)))
        card = ModelCard(cell.model_name, cell.model_revision, "", cell.vocab_size, cell.max_model_len, (), "float32")
        return chain(root_hash(namespace(card), salt), prompt)

    async def tiers(self, units: Sequence[UnitHash]) -> list[Tiers]:
        """Of each unit; up to some 300 ms old."""
        redis: Any
        async with open_redis(self._stack.redis.url) as redis:
            entry = WorkerEntry.decode(await redis.hgetall(keys.worker(CELL, self._worker_id)))
            values = await redis.hmget(keys.prefixes(CELL, self._worker_id, Epoch(entry.epoch)), list(units))
        return [TIERS_OF[value] if value else () for value in values]

    async def fill_until(self, enough: Callable[[], bool]) -> None:
        """Compute other prompts, which push the least recently used units down, until it is enough."""
        for _ in range(MAX_FILLERS):
            prompt = [random.randrange(1000, 40_000) for _ in range(self._filler_tokens)]
            assert (await complete(self._session, self._stack.url, prompt, 1)).error is None
            if enough():
                return
        raise AssertionError(f"not after {MAX_FILLERS} prompts")

    async def push_down(self, units: Sequence[UnitHash], tier: Tier) -> None:
        """Until each unit lies in this tier alone."""
        for _ in range(MAX_FILLERS):
            await self.fill_until(lambda: True)
            if set(tiers := await self.tiers(units)) == {(tier,)}:
                return
        raise AssertionError(f"after {MAX_FILLERS} prompts the units are in {tiers}")


def tier_hits(worker: Service, tier: Tier) -> int:
    """Units that a worker has read from a tier."""
    samples = worker.samples("phasemesh_worker_tier_reads_total")
    return int(sum(n for labels, n in samples.items() if f'tier="{tier}"' in labels and 'result="hit"' in labels))
