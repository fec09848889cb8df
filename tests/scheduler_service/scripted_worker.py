"""A worker process without a model: real gRPC in front of the engine tests' PagedWorker, which checks every KV slot.

Also a program, for tests that freeze or kill a worker:
`python -m tests.scheduler_service.scripted_worker PORT [STEP_S]`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
from redis.asyncio import Redis

from tests.engine.paged_worker import PagedWorker
from wire import keys
from wire import worker_pb2 as pb
from wire.entries import WorkerEntry
from wire.ids import WorkerId
from wire.plan import ModelCard, StepReport
from wire.worker_codec import decode_plan, encode_hello, encode_report, encode_residents
from wire.worker_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server

SERVER_OPTIONS = (("grpc.http2.min_ping_interval_without_data_ms", 300), ("grpc.so_reuseport", 0))


class ScriptedWorker(WorkerServicer):
    """Serves one session at a time; a new one takes over, as from a higher fence."""

    def __init__(
        self,
        worker_id: str = "w1",
        *,
        epoch: int = 1,
        num_pages: int = 64,
        step_budget: int = 256,
        step_s: float = 0.0,
        card: ModelCard | None = None,
    ) -> None:
        self.paged = PagedWorker(worker_id, num_pages, 16, step_budget, epoch)
        if card is not None:
            self.paged.info = replace(self.paged.info, model=card)
        self.step_s = step_s
        self.fences: list[int] = []
        self.metadata: dict[str, str] = {}
        self.refuse_fence = False
        self.running = asyncio.Event()
        """Cleared, the worker runs no further step."""
        self.running.set()
        self._work = asyncio.Event()
        self.address = ""

    async def Session(self, requests: AsyncIterator[pb.ToWorker], context: Any) -> None:  # type: ignore[override]
        attach = (await anext(requests)).attach
        self.fences.append(attach.fence)
        self.metadata = dict(context.invocation_metadata())
        if self.refuse_fence:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "fence refused")
        paged = self.paged
        paged.reconnect()
        await context.write(pb.ToScheduler(hello=encode_hello(paged.info)))
        residents = paged.residents()
        await context.write(pb.ToScheduler(residents=encode_residents(residents[:1], last=False)))
        await context.write(pb.ToScheduler(residents=encode_residents(residents[1:], last=True)))
        stepping = asyncio.create_task(self._step(context))
        try:
            async for message in requests:
                paged.plans.append(decode_plan(message.plan))
                self._work.set()
        finally:
            stepping.cancel()
            await asyncio.wait([stepping])

    async def ListUnits(self, request: pb.ListUnitsRequest, context: Any) -> None:  # type: ignore[override]
        if request.epoch != self.paged.info.epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another epoch")
        for page in self.paged.residents():
            await context.write(encode_residents([page], last=False))

    async def _step(self, context: Any) -> None:
        paged = self.paged
        while True:
            if paged.is_idle:
                self._work.clear()
                await self._work.wait()
            await self.running.wait()
            paged.run_step()
            while paged.reports:
                report = paged.reports.popleft()
                assert isinstance(report, StepReport)  # it takes part in no pull
                await context.write(pb.ToScheduler(report=encode_report(report)))
            await asyncio.sleep(self.step_s)


@asynccontextmanager
async def serve(worker: ScriptedWorker, port: int = 0) -> AsyncIterator[grpc.aio.Server]:
    """Serve on loopback; the test may stop the server earlier, which breaks the session at once."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    worker.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    add_WorkerServicer_to_server(worker, server)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(None)


async def register(redis: Redis, cell: str, worker: ScriptedWorker, *, lease_s: float = 60.0) -> None:
    info = worker.paged.info
    await register_at(redis, cell, info.worker_id, worker.address, info.epoch, lease_s=lease_s)


async def register_at(
    redis: Redis, cell: str, worker_id: WorkerId, address: str, epoch: int, *, lease_s: float = 60.0
) -> None:
    fields: Any = WorkerEntry(worker_id, address, epoch, pid=0).encode()
    await redis.hset(keys.worker(cell, worker_id), mapping=fields)
    await redis.zadd(keys.workers(cell), {worker_id: time.time() + lease_s})


async def _main(port: int, step_s: float) -> None:
    worker = ScriptedWorker(epoch=time.time_ns() // 1_000_000, step_s=step_s)
    async with serve(worker, port) as server:
        print(worker.address, worker.paged.info.epoch, flush=True)
        await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
