"""The scheduler's shells around an inbox that the test reads, and the gateway's side of Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

from redis.asyncio import Redis

from observability.metrics import SchedulerMetrics
from observability.tracing import NullTracer
from scheduler.arrivals import Arrivals
from scheduler.clock import Clock
from scheduler.events import Event
from scheduler.lease import Lease
from scheduler.pending import PendingRequests
from scheduler.publisher import Publisher
from scheduler.recovery import Recovery
from scheduler.request_spans import RequestSpans
from scheduler.terminals import Terminals
from tests.engine.paged_worker import CARD
from wire import keys
from wire.entries import ReplyEntry, ReplyItem, RequestEntry
from wire.ids import Fence, GatewayId, RequestId
from wire.journal import Journal
from wire.plan import ModelCard
from wire.sampling import SamplingParams

CELL = "test"
POLL_S = 0.01
GATEWAY = GatewayId("gw")


def request_entry(request_id: str, prompt: list[int] | None = None, **changes: Any) -> RequestEntry:
    sampling = SamplingParams(max_tokens=changes.pop("max_tokens", 20), ignore_eos=True)
    entry = RequestEntry(RequestId(request_id), GATEWAY, prompt or [5, 6, 7, 8], sampling, arrived_unix_s=time.time())
    return replace(entry, **changes)


async def submit(redis: Redis, entry: RequestEntry, lane: str = "interactive") -> bytes:
    """As a gateway does it; returns the id of the stream entry."""
    fields: Any = entry.encode()
    await redis.sadd(keys.live(CELL), entry.request_id)
    entry_id = await redis.xadd(keys.requests(CELL, lane), fields)
    journal: Any = {"gw": entry.gateway_id, "lane": lane, "entry": entry_id}
    await redis.hset(keys.journal(CELL, entry.request_id), mapping=journal)
    return cast(bytes, entry_id)


async def replies(redis: Redis, gateway_id: GatewayId = GATEWAY) -> list[ReplyEntry]:
    return [ReplyEntry.decode(raw) for _, raw in cast(Any, await redis.xrange(keys.replies(CELL, gateway_id)))]


async def reply_items(redis: Redis, gateway_id: GatewayId = GATEWAY) -> list[ReplyItem]:
    return [item for entry in await replies(redis, gateway_id) for item in entry.items]


async def journal_of(redis: Redis, request_id: str) -> Journal:
    return Journal.decode(cast(Any, await redis.hgetall(keys.journal(CELL, RequestId(request_id)))))


async def until(condition: Callable[[], Awaitable[Any]], timeout_s: float = 5.0) -> None:
    """Wait for something another process or task brings about."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110  # it happens in Redis
            await asyncio.sleep(POLL_S)


async def is_closed(redis: Redis, request_id: str) -> bool:
    """Nothing of the request is left but its journal with the terminal, which will expire."""
    journal = keys.journal(CELL, RequestId(request_id))
    if not await redis.hexists(journal, "terminal") or await redis.sismember(keys.live(CELL), request_id):
        return False
    pending = [await redis.xpending(keys.requests(CELL, lane), keys.SCHEDULER_GROUP) for lane in keys.LANES]
    lengths = [await redis.xlen(keys.requests(CELL, lane)) for lane in keys.LANES]
    return not any(cast(Any, p)["pending"] for p in pending) and not any(lengths) and await redis.ttl(journal) > 0


class Parts:
    """What one tenure has, less engine and workers."""

    def __init__(self, redis_url: str, redis: Redis, holder: str = "me") -> None:
        self.url = redis_url
        self.redis: Any = redis  # redis-py types a reply by everything any server may say
        self.lease = Lease(redis, CELL, holder, ttl_s=1.0)

    def build(self) -> None:
        """Once the lease is held."""
        self.clock = Clock()
        self.inbox: asyncio.Queue[Event] = asyncio.Queue(1000)
        self.pending = PendingRequests()
        self.metrics = SchedulerMetrics()
        self.spans = RequestSpans(NullTracer(), CELL)
        self.publisher = Publisher(self.url, CELL, self.lease, self.pending, self.clock, self.metrics)
        self.terminals = Terminals(self.pending, self.publisher, self.spans)
        self.arrivals = Arrivals(
            self.inbox, self.pending, self.terminals, self.spans, self.clock, no_worker_grace_s=0.3
        )
        self.recovery = Recovery(
            self.redis,
            CELL,
            self.fence,
            pending=self.pending,
            arrivals=self.arrivals,
            terminals=self.terminals,
            publisher=self.publisher,
            clock=self.clock,
        )

    @property
    def fence(self) -> Fence:
        return self.lease.fence

    async def know_model(self, card: ModelCard = CARD) -> None:
        await self.arrivals.model_known(card)

    def events(self) -> list[Event]:
        """What is in the inbox now."""
        taken = []
        while not self.inbox.empty():
            taken.append(self.inbox.get_nowait())
        return taken

    async def aclose(self) -> None:
        await self.publisher.aclose()
