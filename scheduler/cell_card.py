"""What the cell shows of itself: the card gateways admit by, and the scheduler's gauges."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from redis.asyncio import Redis

from observability.metrics import SchedulerMetrics
from scheduler.lease import Lease
from scheduler.redis_io import REDIS_ERRORS, Patience
from scheduler.stats import EngineStats
from wire import keys
from wire.entries import CellCard, CellWorker
from wire.ids import Fence, WorkerId
from wire.plan import ModelCard, Role

log = logging.getLogger(__name__)

PUBLISH_S: Final = 0.5
NO_MODEL: Final = ModelCard("", "", "", vocab_size=0, max_model_len=0, eos_token_ids=(), kv_dtype="")

# KEYS fence, card; ARGV our fence, ttl_ms, "1" to leave a card that is there, then field, value, …
# Returns 0 when fenced out or left.
_PUBLISH: Final = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[3] == '1' and redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('HSET', KEYS[2], unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""


def make_card(stats: EngineStats, fence: Fence) -> CellCard:
    """Until a worker told which model the cell serves, that is empty."""
    model = stats.model or NO_MODEL
    return CellCard(
        model_name=model.name,
        model_revision=model.revision,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        max_request_tokens=stats.max_request_tokens,
        eos_token_ids=list(model.eos_token_ids),
        num_workers=len(stats.workers),
        fence=fence,
        predicted_drain_s=stats.predicted_drain_s,
        workers=[CellWorker(worker.worker_id, worker.role, worker.running) for worker in stats.workers],
    )


class CellCardPublisher:
    """Publishes every PUBLISH_S, and at once when told that workers came or went."""

    def __init__(
        self, redis: Redis, cell: str, lease: Lease, stats: Callable[[], EngineStats], metrics: SchedulerMetrics
    ) -> None:
        self._redis = redis
        self._keys = (keys.fence(cell), keys.cell_card(cell))
        self._fence = lease.fence
        self._stats = stats
        self._gauges = _Gauges(metrics)
        self._has_published = False
        self._workers_changed = asyncio.Event()

    def workers_changed(self) -> None:
        self._workers_changed.set()

    async def run(self) -> None:
        """Publish for ever; a scheduler that is not active any more has no gauges."""
        try:
            await self._run()
        finally:
            self._gauges.clear()

    async def _run(self) -> None:
        patience = Patience(log, "publishing the cell card")
        while True:
            self._workers_changed.clear()
            stats = self._stats()
            self._gauges.show(stats)
            try:
                await self._publish(stats)
                patience.success()
            except REDIS_ERRORS as error:
                await patience.after(error)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_S):
                    await self._workers_changed.wait()

    async def _publish(self, stats: EngineStats) -> None:
        """A refusal is the lease's business, who renews it notices as well."""
        fields = [part for pair in make_card(stats, self._fence).encode().items() for part in pair]
        ttl_ms = int(keys.SCHEDULER_LEASE_TTL_S * 1000)
        # The workers are about to come over from our predecessor: gateways admit by its card until that lapses.
        leaves_other = stats.model is None and not self._has_published
        args = (self._fence, ttl_ms, int(leaves_other), *fields)
        if await self._redis.eval(_PUBLISH, 2, *self._keys, *args):
            self._has_published = True


class _Gauges:
    """EngineStats as Prometheus gauges."""

    def __init__(self, metrics: SchedulerMetrics) -> None:
        self._metrics = metrics
        self._preemptions = 0
        self._displaced = 0
        self._shown: set[WorkerId] = set()
        self._model_name: str | None = None

    def show(self, stats: EngineStats) -> None:
        metrics = self._metrics
        for role in Role:
            metrics.workers.labels(role).set(sum(worker.role is role for worker in stats.workers))
        present = {worker.worker_id for worker in stats.workers}
        for worker_id in self._shown - present:
            metrics.forget_worker(worker_id)
        self._shown = present
        if stats.model is None:
            return
        model = stats.model.name
        if model != self._model_name:
            self._clear_queues()
            self._model_name = model
        metrics.requests_waiting.labels(model).set(stats.waiting)
        metrics.requests_running.labels(model).set(stats.running)
        metrics.preemptions.labels(model).inc(stats.preemptions - self._preemptions)
        self._preemptions = stats.preemptions
        metrics.displaced.inc(stats.displaced - self._displaced)
        self._displaced = stats.displaced
        for worker in stats.workers:
            metrics.show_worker(worker.worker_id, role=worker.role, running=worker.running, pulling=worker.num_pulling)
            pages = worker.pages
            metrics.set_pages(
                model,
                worker.worker_id,
                free=pages.free,
                cached=pages.cached,
                in_use=pages.in_use,
                retiring=pages.retiring,
            )

    def clear(self) -> None:
        """Show nothing any more; counters stay."""
        for role in Role:
            self._metrics.workers.labels(role).set(0)
        for worker_id in self._shown:
            self._metrics.forget_worker(worker_id)
        self._shown = set()
        self._clear_queues()

    def _clear_queues(self) -> None:
        self._metrics.requests_waiting.clear()
        self._metrics.requests_running.clear()
