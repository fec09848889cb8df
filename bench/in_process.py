"""The scheduler's engine and the worker's executor in one process: no gateway, Redis or gRPC. For bench.mesh_share.

    clients ─▸ RequestArrived ─▸ engine ─▸ plans ─▸ executor ─▸ StepReport ─▸ engine ─▸ FinishRequest ─▸ clients

Reads a list of `Round` as JSON, one per line, and answers each with the seconds it took.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass
from itertools import count

import uvloop

from gpu_worker.__main__ import load_model
from gpu_worker.executor import Executor, PlanChannel, WorkerReport
from gpu_worker.telemetry import StepTelemetry
from kvstore.prefix_hash import namespace, root_hash
from observability.metrics import WorkerMetrics
from observability.tracing import NullTracer
from scheduler.commands import DispatchPlan, FinishRequest
from scheduler.engine import Engine
from scheduler.events import Event, Request, RequestArrived, StepReported, WorkerUp
from wire.collector import calm_collector
from wire.config import SchedulerConfig, WorkerConfig, load
from wire.ids import UNIT_TOKENS, Epoch, Fence, GatewayId, RequestId, WorkerId
from wire.plan import Role, StepPlan, StepReport, WorkerInfo
from wire.sampling import SamplingParams

WORKER = WorkerId("w")
FENCE = Fence(1)


@dataclass(frozen=True, slots=True)
class Round:
    """So many clients without a pause, each sends its next prompt when its last has ended."""

    streams: int
    output_tokens: int
    prompts: list[list[int]]


class InProcess:
    """`await InProcess(…).run(round)`; the engine's time is the process's clock."""

    def __init__(self, executor: Executor, engine: Engine, info: WorkerInfo) -> None:
        self._executor = executor
        self._engine = engine
        self._info = info
        self._plans: asyncio.Queue[StepPlan] = asyncio.Queue()
        self._ended: dict[RequestId, asyncio.Future[None]] = {}
        self._ids = count(1)
        self._root = root_hash(namespace(info.model))

    async def serve(self) -> None:
        """Attach to the executor and pass plans on, for ever."""
        channel = PlanChannel(self._deliver)
        snapshot = await self._executor.open(channel)
        self._handle(WorkerUp(self._info, snapshot.residents, snapshot.tiers))
        while True:
            await self._executor.submit(channel, await self._plans.get())

    async def run(self, load: Round) -> float:
        """Seconds from the first prompt to the last token."""
        left = iter(load.prompts)

        async def client() -> None:
            for prompt in left:  # shared: each prompt goes to one client
                await self._ask(prompt, load.output_tokens)

        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as clients:
            for _ in range(load.streams):
                clients.create_task(client())
        return time.perf_counter() - began_s

    async def _ask(self, prompt: list[int], output_tokens: int) -> None:
        name = RequestId(str(next(self._ids)))
        sampling = SamplingParams(output_tokens, temperature=0.0, ignore_eos=True)
        ended = self._ended[name] = asyncio.get_running_loop().create_future()
        self._handle(RequestArrived(Request(name, GatewayId("g"), prompt, sampling, self._root)))
        await ended

    def _deliver(self, report: WorkerReport) -> None:
        if not isinstance(report, StepReport) or report.failure is not None:
            raise SystemExit(f"unexpected report: {report}")
        self._handle(StepReported(WORKER, self._info.epoch, report))

    def _handle(self, event: Event) -> None:
        for command in self._engine.handle(event, time.monotonic()):
            match command:
                case DispatchPlan(plan=plan):
                    self._plans.put_nowait(plan)
                case FinishRequest(terminal=terminal):
                    if terminal.error_code is not None:
                        raise SystemExit(f"a request failed: {terminal.error_message}")
                    self._ended.pop(terminal.request_id).set_result(None)
                case _:
                    pass


async def main() -> None:
    worker, scheduler = load(WorkerConfig, os.environ), load(SchedulerConfig, os.environ)
    runner = await asyncio.to_thread(load_model, worker)
    async with Executor(runner, StepTelemetry(WorkerMetrics(), NullTracer()), epoch=Epoch(1)) as executor:
        pages = runner.num_pages, runner.page_size
        info = WorkerInfo(WORKER, executor.epoch, Role.BOTH, "127.0.0.1:1", runner.card, *pages, UNIT_TOKENS)
        engine = Engine(
            scheduler.batching,
            no_worker_grace_s=scheduler.no_worker_grace_s,
            routing_seed=scheduler.routing_seed,
            fence=FENCE,
        )
        driven = InProcess(executor, engine, info)
        serving = asyncio.create_task(driven.serve())
        calm_collector()
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await driven.run(Round(**json.loads(line)))), flush=True)
        serving.cancel()


if __name__ == "__main__":
    uvloop.run(main())
