"""What the gateway knows of its cell: the scheduler's card, read often, and whether new requests may come in."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from redis.asyncio import Redis

from gateway.redis_link import REDIS_ERRORS, refused
from wire import keys
from wire.entries import CellCard
from wire.errors import EntryMalformed, MeshError, Unavailable
from wire.ids import GatewayId

log = logging.getLogger("gateway.cell")

WATCH_S = 0.25


class CellWatch:
    """Reads the cell's card and renews this gateway's lease."""

    def __init__(self, redis: Redis, cell: str, gateway_id: GatewayId, model_name: str, mesh_grace_s: float) -> None:
        self._redis = redis
        self._cell = cell
        self._gateway_id = gateway_id
        self._model_name = model_name
        self._mesh_grace_s = mesh_grace_s
        self.card: CellCard | None = None
        """None: no scheduler is active, or Redis is away."""
        self.problem: str | None = "starting"
        """Why new requests are refused; None when they are not."""

    async def run(self, on_lost: Callable[[MeshError], None]) -> None:
        """Watch for ever. `on_lost` is called once the cell has been away for the grace period, and while it stays."""
        seen_s = time.monotonic()
        while True:
            before = self.problem
            await self.look()
            if self.problem != before:
                log.log(logging.WARNING if self.problem else logging.INFO, "cell: %s", self.problem or "ready")
            now_s = time.monotonic()
            if self.card is not None:
                seen_s = now_s
            elif now_s - seen_s >= self._mesh_grace_s:
                on_lost(Unavailable(self.problem or "the cell is away"))
            await asyncio.sleep(WATCH_S)

    async def look(self) -> None:
        """One round: read the card, renew the lease."""
        lease: dict[str, float] = {self._gateway_id: time.time() + keys.GATEWAY_LEASE_TTL_S}
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.hgetall(keys.cell_card(self._cell))
                pipe.zadd(keys.gateways(self._cell), lease)
                raw, _ = await pipe.execute()
        except REDIS_ERRORS as error:
            problem = "Redis refuses this gateway's commands" if refused(error) else "Redis is away"
            log.log(logging.DEBUG if problem == self.problem else logging.WARNING, "cell card: %s", error)
            self.card, self.problem = None, problem
            return
        try:
            self.card = CellCard.decode(raw) if raw else None
        except EntryMalformed as error:
            self.card, self.problem = None, str(error)
            return
        self.problem = self._find_problem()

    def _find_problem(self) -> str | None:
        if self.card is None:
            return "no scheduler is active"
        if self.card.num_workers == 0:
            return "no worker is up"
        if self.card.model_name != self._model_name:
            return f"the cell serves {self.card.model_name!r}, this gateway is configured for {self._model_name!r}"
        return None

    async def leave(self) -> None:
        """Give the lease up: nothing of this gateway's is left in the mesh. Raises redis-py's errors."""
        await self._redis.zrem(keys.gateways(self._cell), self._gateway_id)
