"""`python -m scheduler`: wait for the cell's lease, schedule while it is held, stop cleanly on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from typing import Final
from uuid import uuid4

import uvloop

from observability.health_server import serve_health
from observability.logs import setup_logging
from observability.loop_lag import watch_loop_lag
from observability.metrics import SchedulerMetrics
from observability.tracing import Tracer, setup_tracing
from scheduler.active import Tenure
from scheduler.lease import Lease
from wire import keys
from wire.collector import calm_collector
from wire.config import SchedulerConfig, load
from wire.errors import MeshError
from wire.redis_client import open_redis
from wire.stop_signals import stop_signals

log = logging.getLogger("scheduler")

LEASE_TIMEOUT_S: Final = keys.SCHEDULER_LEASE_TTL_S / 3
STANDBY: Final = "standby: another scheduler holds the lease, or Redis is away"
STOPPING: Final = "the scheduler is stopping"


class Scheduler:
    """Standby, active, standby again, for as long as the process lives."""

    def __init__(self, config: SchedulerConfig, metrics: SchedulerMetrics, tracer: Tracer) -> None:
        self._config = config
        self._metrics = metrics
        self._tracer = tracer
        self._scheduler_id = config.scheduler_id or f"{socket.gethostname()}-{os.getpid()}"
        # Only the lease uses it: a renewal that takes longer than this is better tried again.
        self._redis = open_redis(
            config.cell.redis_url,
            cell=config.cell.cell,
            command_timeout_s=LEASE_TIMEOUT_S,
            connect_timeout_s=LEASE_TIMEOUT_S,
        )
        self._stopping = False
        self.not_ready: str | None = STANDBY

    def stop(self) -> None:
        """To be said before run() is cancelled: a cancellation may drown in a fence that is lost at the same time."""
        self._stopping = True

    async def run(self) -> None:
        """Run until cancelled; then release the lease, so that a successor starts at once."""
        lease = Lease(self._redis, self._config.cell.cell, f"{self._scheduler_id}/{uuid4().hex}")
        try:
            while not self._stopping:
                await lease.acquire()
                self.not_ready = None
                await Tenure(self._config, self._scheduler_id, lease, self._metrics, self._tracer).run()
                self.not_ready = STANDBY
        finally:
            self.not_ready = STOPPING
            await lease.release()
            await self._redis.aclose()


async def run_scheduler(config: SchedulerConfig, tracer: Tracer) -> None:
    """Serve until a stop signal."""
    metrics = SchedulerMetrics()
    scheduler = Scheduler(config, metrics, tracer)
    signals = stop_signals()
    async with (
        serve_health(
            config.health_host, config.health_port, ready=lambda: scheduler.not_ready, registry=metrics.registry
        ) as port,
        asyncio.TaskGroup() as tasks,
    ):
        log.info("started", extra={"cell": config.cell.cell, "health_port": port})
        running = [
            tasks.create_task(scheduler.run()),
            tasks.create_task(watch_loop_lag(metrics.event_loop_lag_s)),
        ]
        await signals.stop.wait()
        scheduler.stop()
        for task in running:
            task.cancel()
    log.info("stopped")


def main() -> int:
    try:
        config = load(SchedulerConfig, os.environ)
        setup_logging("scheduler", config.cell.log_level)
        tracer = setup_tracing("scheduler", os.environ)
        calm_collector()
    except (MeshError, ValueError) as error:
        print(f"scheduler: {error}", file=sys.stderr)
        return 2
    try:
        uvloop.run(run_scheduler(config, tracer))
    except (MeshError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    finally:
        tracer.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
