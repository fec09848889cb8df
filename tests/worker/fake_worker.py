"""A whole worker in this process: real executor, real gRPC server on a free port, the fake model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gpu_worker.executor import Executor
from gpu_worker.server import WorkerService, bind_server, serving
from gpu_worker.server.session import WorkerIdentity
from gpu_worker.telemetry import StepTelemetry
from gpu_worker.transfer.messages import CHUNK_BYTES
from gpu_worker.transfer.plane import open_plane
from gpu_worker.transfer.port import LowerTiers
from gpu_worker.transfer.transports import GRPC, SHM
from kvstore.prefix_hash import namespace
from observability.metrics import WorkerMetrics
from observability.tracing import NullTracer, Tracer
from tests.worker.fake_runner import FakeRunner
from wire.ids import Epoch, WorkerId

LAYER_BYTES = 2048
"""One layer, K and V, of eight of the fake runner's units."""


@dataclass(frozen=True)
class FakeWorker:
    worker_id: WorkerId
    address: str
    runner: FakeRunner
    executor: Executor
    service: WorkerService
    metrics: WorkerMetrics

    @property
    def unit_bytes(self) -> int:
        assert self.runner.kv is not None
        return self.runner.kv.unit_bytes


@asynccontextmanager
async def running_worker(
    runner: FakeRunner | None = None,
    *,
    worker_id: str = "w1",
    epoch: int = 100,
    port: int = 0,
    tracer: Tracer | None = None,
    tiers: LowerTiers | None = None,
    transports: Sequence[str] = (SHM, GRPC),
    after_copy: Callable[[int], None] | None = None,
    after_read: Callable[[int], None] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> AsyncIterator[FakeWorker]:
    """A worker that schedulers may attach to. Leaving the block is its clean shutdown.

    after_copy: between its copy of a layer out of another's memory and its check; after_read: between its read of a
    layer for another and its check.
    """
    runner = runner or FakeRunner()
    tracer = tracer or NullTracer()
    metrics = WorkerMetrics()
    server, bound = bind_server("127.0.0.1", port)
    identity = WorkerIdentity(WorkerId(worker_id), f"127.0.0.1:{bound}")
    with open_plane(
        runner.kv,
        worker_id=identity.worker_id,
        namespace=namespace(runner.card),
        tiers=tiers,
        only=transports,
        after_copy=after_copy,
    ) as plane:
        executor = Executor(
            runner, StepTelemetry(metrics, tracer), epoch=Epoch(epoch), puller=plane.puller, tiers=tiers
        )
        service = WorkerService(executor, identity, tracer)
        source = plane.source(executor, after_read=after_read, chunk_bytes=chunk_bytes)
        async with executor, source, serving(server, service, source):
            yield FakeWorker(identity.worker_id, identity.advertise_address, runner, executor, service, metrics)
