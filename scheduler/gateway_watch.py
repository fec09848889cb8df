"""Ends the work of gateways that are gone: RESUME_GRACE_S after the lease lapsed (design §7)."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from redis.asyncio import Redis

from scheduler.clock import Clock
from scheduler.events import CancelRequested, Event
from scheduler.pending import PendingRequests
from scheduler.redis_io import REDIS_ERRORS, Patience
from wire import keys
from wire.ids import GatewayId

log = logging.getLogger(__name__)

CHECK_S: Final = 1.0
REASON: Final = "gateway_lost"


class GatewayWatch:
    def __init__(
        self,
        redis: Redis,
        cell: str,
        pending: PendingRequests,
        inbox: asyncio.Queue[Event],
        clock: Clock,
        *,
        grace_s: float = keys.RESUME_GRACE_S,
    ) -> None:
        self._redis = redis
        self._key = keys.gateways(cell)
        self._pending = pending
        self._inbox = inbox
        self._clock = clock
        self._grace_s = grace_s
        self._reachable_since_s = clock.now()
        """No gateway could renew its lease while Redis was away: that time does not count."""
        self._absent_since_s: dict[GatewayId, float] = {}
        """Gateways with requests but without a lease, not even a lapsed one: since when we see that."""

    async def run(self) -> None:
        patience = Patience(log, "reading gateway leases")
        while True:
            try:
                await self._check()
                patience.success()
            except REDIS_ERRORS as error:
                await patience.after(error)
                self._reachable_since_s = self._clock.now()
            await asyncio.sleep(CHECK_S)

    async def _check(self) -> None:
        gateways = self._pending.gateways()
        self._absent_since_s = {g: since for g, since in self._absent_since_s.items() if g in gateways}
        if not gateways:
            return
        lapses = await self._redis.zmscore(self._key, [str(gateway_id) for gateway_id in gateways])
        now = self._clock.now()
        for gateway_id, lapses_s in zip(gateways, lapses, strict=True):
            if lapses_s is None:
                lapses_s = self._absent_since_s.setdefault(gateway_id, now)
            else:
                self._absent_since_s.pop(gateway_id, None)
            if now - max(lapses_s, self._reachable_since_s) > self._grace_s:
                await self._cancel_all(gateway_id)

    async def _cancel_all(self, gateway_id: GatewayId) -> None:
        """Until they are ended, every check says so again, which is harmless."""
        request_ids = self._pending.of_gateway(gateway_id)
        log.warning("gateway lost, its requests are cancelled", extra={"gateway": gateway_id, "n": len(request_ids)})
        for request_id in request_ids:
            await self._inbox.put(CancelRequested(request_id, REASON))
