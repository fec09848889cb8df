"""The worker in virtual time says what the worker says: the same plans, the same reports, in the same order.

Each worker of a cell is a pair: the executor over a simulated runner, whose steps end when the test says so, and
bench.virtual_worker. The engine's plans for random requests go to both, and what both say is held side by side.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields, replace
from typing import Any

import pytest

from bench.simulator import CARD
from bench.virtual_pulls import Source, VirtualPuller
from bench.virtual_worker import VirtualWorker, WorkerReport, predicted_token
from gpu_worker.executor import Executor, PlanChannel
from gpu_worker.residency import Residency
from gpu_worker.simulated_runner import SimulatedRunner
from gpu_worker.step_cost import PullCost, StepCost
from gpu_worker.telemetry import StepTelemetry
from gpu_worker.transfer.port import KvPages
from kvstore.prefix_hash import namespace, root_hash
from observability.metrics import WorkerMetrics
from observability.tracing import NullTracer
from scheduler.commands import DispatchPlan, FinishRequest
from scheduler.engine import Engine
from scheduler.events import CancelRequested, Event, PullReported, Request, RequestArrived, StepReported, WorkerUp
from wire.config import BatchingConfig
from wire.ids import UNIT_TOKENS, Epoch, Fence, GatewayId, RequestId, WorkerId
from wire.plan import KvPull, Role, StepPlan, StepReport, WorkerInfo
from wire.sampling import SamplingParams

TIMEOUT_S = 10.0
NUM_PAGES = 20
NUM_REQUESTS = 24
STEP = StepCost(fixed_us=2000, prefill_token_us=700, decode_token_us=100)
"""Prefilling is so slow that KV is worth pulling."""
PULL = PullCost(fixed_us=1000, unit_us=500)


class PredictedTokens:
    """In the place of a simulated runner's own: as virtual workers draw them."""

    logprob = 0.0

    def tokens(self, seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> list[int]:
        return [predicted_token(seed, at, CARD.vocab_size) for seed, at in zip(seeds, positions, strict=True)]


class Held:
    """Calls that virtual time would make one day: the test makes them, oldest first."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self.calls.append(call)


class RealSource:
    """An executor's side of a pull."""

    def __init__(self, residency: Residency, pages: KvPages) -> None:
        self.residency = residency
        self.pages = pages
        self.is_stopped = False


class Pair:
    """One worker, twice. `async with opened(…)`."""

    def __init__(self, info: WorkerInfo, cell: Cell) -> None:
        self.info = info
        self.said: deque[WorkerReport] = deque()
        """By both; the engine has not heard of it."""
        self._real_said: deque[WorkerReport] = deque()
        self._virtual_said: deque[WorkerReport] = deque()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._is_in_step = False
        self._leave = threading.Semaphore(0)
        self._steps, self._pulls, self._real_pulls = Held(), Held(), Held()
        self._runner = SimulatedRunner(
            CARD, STEP, num_pages=info.num_pages, page_size=info.page_size, now=lambda: 0.0, sleep=self._step
        )
        self._runner._source = PredictedTokens()  # type: ignore[assignment]
        pages = self._runner.kv
        assert pages is not None
        puller = VirtualPuller(PULL, pages, lambda pull: cell.pair(pull).real_source, self._real_pulls.after)
        telemetry = StepTelemetry(WorkerMetrics(), NullTracer())
        self.executor = Executor(self._runner, telemetry, epoch=info.epoch, puller=puller)
        self.real_source: Source = RealSource(self.executor.residency, pages)
        self._channel = PlanChannel(self._real_report)
        self.virtual = VirtualWorker(
            info,
            STEP,
            after=self._virtual_after,
            deliver=lambda _, report: self._virtual_said.append(report),
            pull=PULL,
            source_of=lambda pull: cell.pair(pull).virtual,
        )

    async def open(self) -> None:
        await self.executor.open(self._channel)

    @property
    def is_idle(self) -> bool:
        return not (self._steps.calls or self._pulls.calls or self.said)

    async def submit(self, plan: StepPlan) -> None:
        self.virtual.submit(plan)
        await self.executor.submit(self._channel, plan)
        await self._settle()

    async def end_step(self) -> None:
        """If one runs."""
        if self._steps.calls:
            self._is_in_step = False
            self._steps.calls.popleft()()
            self._leave.release()
            await self._settle()

    async def go_on_pulling(self) -> None:
        """By one event: a lease is renewed, a pull begins to move, or it is over."""
        assert len(self._pulls.calls) == len(self._real_pulls.calls)
        if self._pulls.calls:
            self._pulls.calls.popleft()()
            self._real_pulls.calls.popleft()()
            await self._settle()

    async def _settle(self) -> None:
        """Until the compute thread has come as far as the virtual worker, and has said the same."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self._real_said) < len(self._virtual_said) or self._is_in_step != bool(self._steps.calls):
                await self._changed.wait()
                self._changed.clear()
        while self._virtual_said:
            virtual = self._virtual_said.popleft()
            assert _comparable(self._real_said.popleft()) == _comparable(virtual)
            self.said.append(virtual)
        assert not self._real_said
        assert self.executor.residency.pages() == self.virtual.residency.pages()

    def _virtual_after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Steps and pulls are two queues: any order between them is possible."""
        held = self._steps if getattr(call, "__qualname__", "").startswith("VirtualWorker._begin_step") else self._pulls
        held.after(delay_s, call)

    def _real_report(self, report: Any) -> None:
        self._real_said.append(report)
        self._changed.set()

    def _step(self, seconds: float) -> None:
        """In the compute thread, for as long as the step takes."""
        self._loop.call_soon_threadsafe(self._entered)
        assert self._leave.acquire(timeout=TIMEOUT_S)

    def _entered(self) -> None:
        self._is_in_step = True
        self._changed.set()


def _comparable(report: WorkerReport) -> object:
    """Without what was measured: times, but for what a step ran."""
    if not isinstance(report, StepReport) or report.timing is None:
        return report
    timing = report.timing
    ran = (timing.prefill_tokens, timing.decode_tokens, timing.context_tokens)
    return replace(report, timing=None), ran


class Cell:
    """An engine with two pairs and random requests, many of which share a prefix."""

    def __init__(self, seed: int, page_size: int, roles: tuple[Role, Role]) -> None:
        self.random = random.Random(seed)
        config = BatchingConfig(
            step_token_budget=64,
            min_chunk_tokens=8,
            max_lease_steps=8,
            max_queued_plans=2 + seed % 2,  # with 3, a plan of decodes alone may give way to a newer one
            kv_watermark=0.0,
        )
        self.engine = Engine(config, no_worker_grace_s=4.0, routing_seed=seed, fence=Fence(1))
        self.now = 0.0
        self.arrived = 0
        self.finished: set[RequestId] = set()
        self.plans: list[StepPlan] = []
        self.pairs: dict[WorkerId, Pair] = {}
        for number, role in enumerate(roles):
            name = WorkerId(f"w{number}")
            info = WorkerInfo(
                name, Epoch(1), role, f"{name}:1", CARD, NUM_PAGES, page_size, UNIT_TOKENS, unit_bytes=1, host_id="h"
            )
            self.pairs[name] = Pair(info, self)

    def pair(self, pull: KvPull) -> Pair:
        return self.pairs[pull.source_worker_id]

    async def feed(self, event: Event) -> None:
        self.now += 0.001
        for command in self.engine.handle(event, self.now):
            match command:
                case DispatchPlan(worker_id, _, plan):
                    self.plans.append(plan)
                    await self.pairs[worker_id].submit(plan)
                case FinishRequest(_, request_id, _, _):
                    self.finished.add(request_id)
                case _:
                    pass

    async def arrive(self) -> None:
        rand = self.random
        prefix = [rand.randrange(3) + 10] * rand.choice([48, 112, 150])
        prompt = [*prefix, *(rand.randrange(1000) for _ in range(rand.choice([0, 7, 60])))]
        sampling = SamplingParams(max_tokens=rand.randrange(1, 50), seed=self.arrived, ignore_eos=True)
        root = root_hash(namespace(CARD))
        request = Request(RequestId(f"r{self.arrived}"), GatewayId("g"), prompt, sampling, root)
        self.arrived += 1
        await self.feed(RequestArrived(request))

    async def deliver(self, pair: Pair) -> None:
        if pair.said:
            report, (worker_id, epoch) = pair.said.popleft(), (pair.info.worker_id, pair.info.epoch)
            kind = StepReported if isinstance(report, StepReport) else PullReported
            await self.feed(kind(worker_id, epoch, report))  # type: ignore[arg-type]

    async def act(self) -> None:
        """Something happens."""
        pair = self.random.choice(list(self.pairs.values()))
        match self.random.choices(["arrive", "cancel", "deliver", "pull", "step"], [2, 0.7, 8, 3, 6])[0]:
            case "arrive" if self.arrived < NUM_REQUESTS:
                await self.arrive()
            case "cancel" if self.arrived:
                await self.feed(CancelRequested(RequestId(f"r{self.random.randrange(self.arrived)}"), "disconnect"))
            case "deliver":
                await self.deliver(pair)
            case "pull":
                await pair.go_on_pulling()
            case _:
                await pair.end_step()


@asynccontextmanager
async def opened(seed: int, page_size: int, roles: tuple[Role, Role]) -> AsyncIterator[Cell]:
    cell = Cell(seed, page_size, roles)
    async with AsyncExitStack() as stack:
        for pair in cell.pairs.values():
            await stack.enter_async_context(pair.executor)
            await pair.open()
            await cell.feed(WorkerUp(pair.info, []))
        yield cell


@pytest.mark.parametrize("roles", [(Role.BOTH, Role.BOTH), (Role.PREFILL, Role.DECODE)])
@pytest.mark.parametrize("page_size", [16, 64])
async def test_the_same_plans_give_the_same_reports(page_size: int, roles: tuple[Role, Role]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(8):
        async with opened(seed, page_size, roles) as cell:
            for _ in range(20_000):
                await cell.act()
                if len(cell.finished) == NUM_REQUESTS and all(pair.is_idle for pair in cell.pairs.values()):
                    break
            else:
                raise AssertionError("it never ended")
            seen.update(field.name for plan in cell.plans for field in fields(plan) if getattr(plan, field.name))
    assert seen.keys() >= {
        "prefill_chunks",
        "decodes",
        "page_copies",
        "kv_pulls",
        "releases",
        "cancelled_pulls",
        "joins",
    }
