"""One tenure of the scheduler: every part made anew and wired up when the lease is taken, gone when it is lost."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvstore.redis_prefix_index import RedisPrefixIndex
from observability.metrics import SchedulerMetrics
from observability.tracing import Tracer
from scheduler import events
from scheduler.arrivals import Arrivals
from scheduler.cell_card import CellCardPublisher
from scheduler.clock import Clock
from scheduler.engine import Engine
from scheduler.gateway_watch import GatewayWatch
from scheduler.index_writer import IndexWriter
from scheduler.intake import ControlIntake, RequestIntake
from scheduler.lease import Lease
from scheduler.pending import PendingRequests
from scheduler.prefix_audit import PrefixAudit
from scheduler.publisher import Publisher
from scheduler.recovery import Recovery
from scheduler.request_spans import RequestSpans
from scheduler.service import Service
from scheduler.terminals import Terminals
from scheduler.worker_registry import WorkerRegistry
from wire.config import SchedulerConfig
from wire.errors import FenceLost
from wire.redis_client import open_redis

log = logging.getLogger(__name__)

MAX_INBOX: Final = 8192
"""Events; when full, the readers of streams and reports wait."""
FLUSH_S: Final = 2.0


class Tenure:
    """Used once: `await Tenure(…).run()`."""

    def __init__(
        self, config: SchedulerConfig, scheduler_id: str, lease: Lease, metrics: SchedulerMetrics, tracer: Tracer
    ) -> None:
        cell, url, clock = config.cell.cell, config.cell.redis_url, Clock()
        inbox: asyncio.Queue[events.Event] = asyncio.Queue(MAX_INBOX)
        # Blocking reads have a connection of their own.
        redis, requests_redis, control_redis = (open_redis(url, cell=cell) for _ in range(3))
        self._connections = (redis, requests_redis, control_redis)
        self._lease = lease
        self._clock = clock
        self._engine = Engine(
            config.batching,
            no_worker_grace_s=config.no_worker_grace_s,
            routing_seed=config.routing_seed,
            fence=lease.fence,
        )
        pending = PendingRequests()
        self._spans = RequestSpans(tracer, cell)
        self._publisher = Publisher(url, cell, lease, pending, clock, metrics)
        terminals = Terminals(pending, self._publisher, self._spans)
        self._arrivals = Arrivals(
            inbox, pending, terminals, self._spans, clock, no_worker_grace_s=config.no_worker_grace_s
        )
        self._registry = WorkerRegistry(
            redis,
            cell,
            lease,
            scheduler_id=scheduler_id,
            inbox=inbox,
            clock=clock,
            tracer=tracer,
            model_known=self._arrivals.model_known,
            is_idle=lambda: not pending.all() and not self._engine.stats().workers,
        )
        index = RedisPrefixIndex(redis, cell, fence=lease.fence)
        self._index = IndexWriter(index, self._engine.twin, lease)
        self._audit = PrefixAudit(
            index,
            self._engine.twin,
            self._index,
            self._registry.sessions,
            inbox,
            metrics,
            period_s=config.index_audit_s,
        )
        self._card = CellCardPublisher(redis, cell, lease, self._engine.stats, metrics)
        self._service = Service(
            self._engine,
            inbox,
            clock,
            send_plan=self._registry.send,
            workers_changed=self._card.workers_changed,
            publisher=self._publisher,
            terminals=terminals,
            index=self._index,
            metrics=metrics,
        )
        self._recovery = Recovery(
            redis,
            cell,
            lease.fence,
            pending=pending,
            arrivals=self._arrivals,
            terminals=terminals,
            publisher=self._publisher,
            clock=clock,
        )
        self._requests = RequestIntake(requests_redis, cell, self._arrivals, self._publisher)
        self._control = ControlIntake(control_redis, cell, inbox)
        self._gateways = GatewayWatch(redis, cell, pending, inbox, clock)

    async def run(self) -> None:
        """Take over what is in flight and serve. Returns when another scheduler is active.

        Cancelled, it publishes what is decided and leaves the rest to a successor.
        """
        try:
            await self._serve()
        except* FenceLost as lost:
            self._engine.handle(events.FenceLost(), self._clock.now())
            self._spans.abandon("another scheduler is active")
            log.warning("back to standby: %s", lost.exceptions[0])
        finally:
            await self._publisher.aclose()
            for redis in self._connections:
                await redis.aclose()

    async def _serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lease.keep())
                tasks.create_task(self._service.run())
                tasks.create_task(self._service.tick())
                tasks.create_task(self._publisher.run())
                tasks.create_task(self._index.run())
                tasks.create_task(self._audit.run())
                tasks.create_task(self._registry.run())
                tasks.create_task(self._arrivals.expire())
                tasks.create_task(self._card.run())
                tasks.create_task(self._gateways.run())
                await self._recovery.run()
                tasks.create_task(self._requests.run())
                tasks.create_task(self._control.run())
        except asyncio.CancelledError:
            await self._publisher.flush(FLUSH_S)
            self._spans.abandon("the scheduler stopped")
            raise
