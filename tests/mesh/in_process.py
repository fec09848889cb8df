"""The engine and real workers' executors in one event loop: the whole policy and model path, no Redis and no gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import assert_never

from gpu_worker.executor import Executor, PlanChannel, WorkerReport
from gpu_worker.model_port import ModelRunner
from gpu_worker.server import WorkerService, bind_server, serving
from gpu_worker.server.session import WorkerIdentity
from gpu_worker.telemetry import StepTelemetry
from gpu_worker.transfer.plane import open_plane
from kvstore.prefix_hash import namespace, root_hash
from observability.metrics import WorkerMetrics
from observability.tracing import NullTracer
from scheduler.commands import DispatchPlan, FinishRequest, PublishReply
from scheduler.engine import Engine
from scheduler.events import (
    CancelRequested,
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
    request_id: RequestId
    outputs: list[list[int]]
    logprobs: list[list[float]]
    terminal: TerminalReply | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class Transfers:
    """The workers pull from one another, by gRPC on loopback or out of each other's memory."""

    transport: str
    after_layer: Callable[[int], None]
    """Called in a transfer's thread before each layer's check; what it raises ends the transfer."""


class InProcessMesh:
    """`async with InProcessMesh([runner, …], config) as mesh: answer = await mesh.ask(prompt, sampling)`."""

    def __init__(
        self,
        runners: Sequence[ModelRunner],
        config: BatchingConfig,
        *,
        roles: Sequence[Role] | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        """roles: of each worker; both, unless given. transfers None: each worker has its own KV only."""
        self.engine = Engine(config, no_worker_grace_s=60.0, routing_seed=0, fence=Fence(1))
        self._runners = {WorkerId(f"w{i}"): runner for i, runner in enumerate(runners)}
        self._roles = dict(zip(self._runners, roles or [Role.BOTH] * len(runners), strict=True))
        self._transfers = transfers
        self._executors: dict[WorkerId, Executor] = {}
        self._addresses: dict[WorkerId, str] = {}
        self._stack = AsyncExitStack()
        self._skipped_s = 0.0
        self._channels: dict[WorkerId, PlanChannel] = {}
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._answers: dict[RequestId, Answer] = {}
        self._changed = asyncio.Condition()
        self._namespace = namespace(runners[0].card)
        self._loop_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> InProcessMesh:
        for worker_id, runner in self._runners.items():
            await self._start(worker_id, runner)
            await self.connect(worker_id)
        self._loop_task = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._loop_task is not None
        self._loop_task.cancel()
        await asyncio.gather(self._loop_task, return_exceptions=True)
        await self._stack.aclose()

    async def _start(self, worker_id: WorkerId, runner: ModelRunner) -> None:
        telemetry = StepTelemetry(WorkerMetrics(), NullTracer())
        if self._transfers is None:
            executor = Executor(runner, telemetry, epoch=Epoch(1))
            self._executors[worker_id] = await self._stack.enter_async_context(executor)
            return
        server, port = bind_server("127.0.0.1", 0)
        identity = WorkerIdentity(worker_id, f"127.0.0.1:{port}")
        after, only = self._transfers.after_layer, (self._transfers.transport,)
        units = namespace(runner.card)
        plane = self._stack.enter_context(
            open_plane(runner.kv, worker_id=worker_id, namespace=units, only=only, after_copy=after)
        )
        executor = await self._stack.enter_async_context(
            Executor(runner, telemetry, epoch=Epoch(1), puller=plane.puller)
        )
        source = await self._stack.enter_async_context(plane.source(executor, after_read=after))
        service = WorkerService(executor, identity, NullTracer())
        await self._stack.enter_async_context(serving(server, service, source))
        self._executors[worker_id], self._addresses[worker_id] = executor, identity.advertise_address

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
            worker_id,
            snapshot.epoch,
            self._roles[worker_id],
            self._addresses.get(worker_id, ""),
            runner.card,
            runner.num_pages,
            runner.page_size,
            UNIT_TOKENS,
            unit_bytes=0 if self._transfers is None or runner.kv is None else runner.kv.unit_bytes,
            host_id="here",
        )
        self._inbox.put_nowait(WorkerUp(info, snapshot.residents))

    def disconnect(self, worker_id: WorkerId) -> None:
        """The worker's stream breaks; its sequences go to whoever is left."""
        executor = self._executors[worker_id]
        executor.close(self._channels.pop(worker_id))
        self._inbox.put_nowait(WorkerDown(worker_id, executor.epoch, "cut by the test"))

    async def ask(self, prompt: list[int], sampling: SamplingParams, *, priority: int = 0, salt: str = "") -> Answer:
        """Run one request to its end. salt: of its prefix hashes."""
        answer = self.begin(prompt, sampling, priority=priority, salt=salt)
        await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)
        return answer

    def begin(self, prompt: list[int], sampling: SamplingParams, *, priority: int = 0, salt: str = "") -> Answer:
        """Send a request."""
        request_id = RequestId(f"r{len(self._answers)}")
        answer = self._answers[request_id] = Answer(request_id, [[]], [[]])
        root = root_hash(self._namespace, salt)
        self._inbox.put_nowait(
            RequestArrived(Request(request_id, GatewayId("g"), prompt, sampling, root, priority=priority))
        )
        return answer

    async def cancel(self, answer: Answer) -> None:
        """End a request that runs."""
        self._inbox.put_nowait(CancelRequested(answer.request_id, "client_gone"))
        await asyncio.wait_for(answer.done.wait(), TIMEOUT_S)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that an event changes."""
        async with self._changed, asyncio.timeout(TIMEOUT_S):
            await self._changed.wait_for(holds)

    def skip(self, seconds: float) -> None:
        """The engine's clock moves on at once."""
        self._skipped_s += seconds

    async def until_running(self, number: int) -> None:
        """Wait until so many sequences run at once."""
        await self.until(lambda: self.engine.stats().running >= number)

    async def _serve(self) -> None:
        while True:
            await self._handle(await self._inbox.get())
            async with self._changed:
                self._changed.notify_all()

    async def _handle(self, event: Event) -> None:
        for command in self.engine.handle(event, asyncio.get_running_loop().time() + self._skipped_s):
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
