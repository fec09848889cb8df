"""A whole worker in this process: real executor, real gRPC server on a free port, the fake model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gpu_worker.executor import Executor
from gpu_worker.server import WorkerService, bind_server, serving
from gpu_worker.server.session import WorkerIdentity
from gpu_worker.telemetry import StepTelemetry
from observability.metrics import WorkerMetrics
from observability.tracing import NullTracer, Tracer
from tests.worker.fake_runner import FakeRunner
from wire.ids import Epoch, WorkerId


@dataclass(frozen=True)
class FakeWorker:
    worker_id: WorkerId
    address: str
    runner: FakeRunner
    executor: Executor
    service: WorkerService
    metrics: WorkerMetrics


@asynccontextmanager
async def running_worker(
    runner: FakeRunner | None = None,
    *,
    worker_id: str = "w1",
    epoch: int = 100,
    port: int = 0,
    tracer: Tracer | None = None,
) -> AsyncIterator[FakeWorker]:
    """A worker that schedulers may attach to. Leaving the block is its clean shutdown."""
    runner = runner or FakeRunner()
    tracer = tracer or NullTracer()
    metrics = WorkerMetrics()
    server, bound = bind_server("127.0.0.1", port)
    identity = WorkerIdentity(WorkerId(worker_id), f"127.0.0.1:{bound}")
    async with Executor(runner, StepTelemetry(metrics, tracer), epoch=Epoch(epoch)) as executor:
        service = WorkerService(executor, identity, tracer)
        async with serving(server, service):
            yield FakeWorker(identity.worker_id, identity.advertise_address, runner, executor, service, metrics)
