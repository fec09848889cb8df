"""The engine and real workers' executors in one event loop: the whole policy and model path, no Redis and no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import assert_never

from gpu_worker.executor import Executor, PlanChannel, WorkerReport
from gpu_worker.model_port import ModelRunner
from gpu_worker.telemetry import StepTelemetry
from kvstore.prefix_hash import namespace, root_hash
from observability.metrics import WorkerMetrics
from observability.tracing import setup_tracing
from scheduler.commands import DispatchPlan, FinishRequest, PublishReply
from scheduler.engine import Engine
from scheduler.events import (
    Event,
    PullReported,
    Request,
    RequestArrived,
    StepReported,
    TierChanged,
    WorkerDown,
    WorkerUp,
)
from wire.config import BatchingConfig
from wire.entries import TerminalReply, TokensReply
from wire.ids import UNIT_TOKENS, Epoch, Fence, GatewayId, RequestId, WorkerId
from wire.plan import PullReport, Role, StepReport, TierUnits, WorkerInfo
from wire.sampling import SamplingParams

TIMEOUT_S = 120.0


@dataclass
class Answer:
    outputs: list[list[int]]
    logprobs: list[list[float]]
    terminal: TerminalReply | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


class InProcessMesh:
    """`async with InProcessMesh([runner, …], config) as mesh: answer = await mesh.ask(prompt, sampling)`."""

    def __init__(self, runners: Sequence[ModelRunner], config: BatchingConfig) -> None:
        self.engine = Engine(config, no_worker_grace_s=60.0, routing_seed=0, fence=Fence(1))
        self._executors = {
            WorkerId(f"w{i}"): Executor(
                runner, StepTelemetry(WorkerMetrics(), setup_tracing("worker", {})), epoch=Epoch(1)
            )
            for i, runner in enumerate(runners)
        }
        self._channels: dict[WorkerId, PlanChannel] = {}
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._answers: dict[RequestId, Answer] = {}
        self._changed = asyncio.Condition()
        self._root = root_hash(namespace(runners[0].card))
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> InProcessMesh:
        for worker_id, executor in self._executors.items():
            await executor.__aenter__()
            await self.connect(worker_id)
        self._loop_task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        for executor in self._executors.values():
            await executor.__aexit__(kind, error, trace)

    async def connect(self, worker_id: WorkerId) -> None:
        """Open a session with a worker, as after its start or a broken stream."""
        executor = self._executors[worker_id]
        epoch = executor.epoch

        def deliver(report: WorkerReport) -> None:
            match report:
                case StepReport():
                    self._inbox.put_nowait(StepReported(worker_id, epoch, report))
                case PullReport():
                    self._inbox.put_nowait(PullReported(worker_id, epoch, report))
                case TierUnits():
                    self._inbox.put_nowait(TierChanged(worker_id, epoch, report))
                case _:
                    assert_never(report)

        channel = PlanChannel(deliver)
        snapshot = await executor.open(channel)
        self._channels[worker_id] = channel
        runner = executor.runner
        info = WorkerInfo(
            worker_id, snapshot.epoch, Role.BOTH, "", runner.card, runner.num_pages, runner.page_size, UNIT_TOKENS
        )
        self._inbox.put_nowait(WorkerUp(info, snapshot.residents))

    def disconnect(self, worker_id: WorkerId) -> None:
        """The worker's stream breaks; its sequences go to whoever is left."""
        executor = self._executors[worker_id]
        executor.close(self._channels.pop(worker_id))
        self._inbox.put_nowait(WorkerDown(worker_id, executor.epoch, "cut by the test"))

    async def ask(self, prompt: list[int], sampling: SamplingParams, *, priority: int = 0) -> Answer:
        """Run one request to its end."""
        request_id = RequestId(f"r{len(self._answers)}")
        answer = self._answers[request_id] = Answer([[]], [[]])
        request = Request(request_id, GatewayId("g"), prompt, sampling, self._root, priority=priority)
        self._inbox.put_nowait(RequestArrived(request))
        await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
        return answer

    async def until_running(self, number: int) -> None:
        """Wait until so many sequences run at once."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.engine.stats().running >= number)

    async def _serve(self) -> None:
        while True:
            await self._handle(await self._inbox.get())
            async with self._changed:
                self._changed.notify_all()

    async def _handle(self, event: Event) -> None:
        for command in self.engine.handle(event, asyncio.get_running_loop().time()):
            match command:
                case DispatchPlan(worker_id, _, plan):
                    channel = self._channels.get(worker_id)
                    if channel is not None:
                        await self._executors[worker_id].submit(channel, plan)
                case PublishReply(_, TokensReply() as reply):
                    answer = self._answers[reply.request_id]
                    assert reply.position == len(answer.outputs[reply.choice])
                    answer.outputs[reply.choice] += reply.tokens
                    answer.logprobs[reply.choice] += [lp.logprob for lp in reply.logprobs or ()]
                case FinishRequest(_, request_id, terminal, _):
                    answer = self._answers[request_id]
                    assert answer.terminal is None
                    answer.terminal = terminal
                    answer.done.set()
