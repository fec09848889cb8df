"""The scheduler's own engine in virtual time: a discrete-event run, thousands of requests in seconds.

    (when, what)   arrival ─▸ Engine.handle ─▸ DispatchPlan ─ link ─▸ VirtualWorker ─ step ─▸ report ─ link ─▸ …

The policy is scheduler.engine, unchanged (design §3); a worker is bench/virtual_worker.py, whose steps take what
gpu_worker/step_cost.py says. Gateway, Redis and CPU are not modelled but for the link's delay, and nobody refuses a
request at the door. A run depends on its inputs alone: the same requests, engine and seeds give the same figures.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from bench.measure import Outcome, Result
from bench.prompts import PromptRequest, TokenIds
from bench.virtual_worker import VirtualWorker, WorkerReport
from gpu_worker.step_cost import PullCost, StepCost
from kvstore.prefix_hash import namespace, root_hash
from scheduler.commands import DispatchPlan, FinishRequest, PublishReply, Transfer
from scheduler.engine import Engine
from scheduler.events import Event, PullReported, Request, RequestArrived, StepReported, Tick, WorkerDown, WorkerUp
from wire.config import BatchingConfig
from wire.entries import TokensReply
from wire.ids import UNIT_TOKENS, Epoch, Fence, GatewayId, RequestId, WorkerId
from wire.plan import KvPull, ModelCard, Role, StepReport, WorkerInfo
from wire.sampling import SamplingParams

TICK_S = 0.25
UNIT_BYTES = 1 << 20
"""Nothing is moved; the engine may only ask whether it is 0."""
GATEWAY = GatewayId("simulated")
CARD = ModelCard("simulated", "simulated", "LlamaForCausalLM", 32_000, 1 << 17, (2,), "float32")


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """One worker of a simulated cell."""

    cost: StepCost
    num_pages: int
    page_size: int = 64
    role: Role = Role.BOTH
    pull: PullCost | None = None
    """None: it neither gives nor takes KV."""


@dataclass(slots=True)
class SimulatedRun:
    """What came of a run, in the order of the requests given."""

    outcomes: list[Outcome]
    tokens: list[list[int]]
    terminals: list[int]
    """How many each request had: one, if all is well."""
    duration_s: float = 0.0
    busy_s: dict[WorkerId, float] = field(default_factory=dict)
    """Time each worker spent in steps."""
    steps: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    """Pulls of KV, as the requests' timelines tell of them."""

    @property
    def utilization(self) -> float:
        """Share of the run's time that workers spent in steps, over all of them."""
        return sum(self.busy_s.values()) / (self.duration_s * len(self.busy_s)) if self.duration_s else 0.0


class Simulation:
    """One cell. `Simulation(engine, shapes).run(requests)`; link_s: from scheduler to worker, and back."""

    def __init__(self, engine: Engine, workers: Sequence[WorkerShape], *, link_s: float = 0.0005) -> None:
        self.engine = engine
        self.now = 0.0
        self.workers: dict[WorkerId, VirtualWorker] = {}
        self._link_s = link_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._root = root_hash(namespace(CARD))
        self._epochs = count(1)
        self._run = SimulatedRun([], [], [])
        self._open = 0  # requests without a terminal
        for number, shape in enumerate(workers, 1):
            self.join(WorkerId(f"worker-{number}"), shape)

    # -- the world: time, and who is in it ---------------------------------------------------------------------------

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it in `delay_s` of virtual time; what falls on one instant is called in the order it was asked for."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), call))

    def join(self, worker_id: WorkerId, shape: WorkerShape) -> None:
        """A worker starts, with nothing in its pages; one of that name must have left."""
        assert worker_id not in self.workers, worker_id
        info = WorkerInfo(
            worker_id,
            Epoch(next(self._epochs)),
            shape.role,
            f"{worker_id}:1",
            CARD,
            shape.num_pages,
            shape.page_size,
            UNIT_TOKENS,
            unit_bytes=0 if shape.pull is None else UNIT_BYTES,
            host_id="simulated",
        )
        worker = VirtualWorker(
            info, shape.cost, after=self.after, deliver=self._deliver, pull=shape.pull, source_of=self._found
        )
        self.workers[worker_id] = worker
        self._run.busy_s.setdefault(worker_id, 0.0)
        self._feed(WorkerUp(info, []))

    def _found(self, pull: KvPull) -> VirtualWorker | None:
        """The life of a worker that a pull names as its source, if it still lasts."""
        source = self.workers.get(pull.source_worker_id)
        return source if source is not None and source.info.epoch == pull.source_epoch else None

    def leave(self, worker_id: WorkerId) -> None:
        """A worker dies with all it holds; the scheduler sees its stream break."""
        worker = self.workers.pop(worker_id)
        worker.stop()
        self._run.busy_s[worker_id] += worker.busy_s
        self._run.steps += worker.steps
        self._feed(WorkerDown(worker_id, worker.info.epoch, "simulated death"))

    # -- a run ---------------------------------------------------------------------------------------------------------

    def run(self, requests: Sequence[PromptRequest], *, limit_s: float = 3600.0) -> SimulatedRun:
        """Send each request at its `at_s` and go on until all have ended. Prompts are token ids.

        Raises AssertionError when some have not ended by `limit_s` of virtual time.
        """
        began_s = self.now
        run = self._run
        run.outcomes = [Outcome(0.0, 0.0, 0.0, Result.ERROR, "no terminal") for _ in requests]
        run.tokens = [[] for _ in requests]
        run.terminals = [0] * len(requests)
        self._open = len(requests)
        for index, request in enumerate(requests):
            assert request.at_s is not None and isinstance(request.prompt, TokenIds)
            self.after(request.at_s, lambda i=index, r=request: self._arrive(i, r))  # type: ignore[misc]
        self.after(TICK_S, self._tick)
        while self._open:
            self._next()
            assert self.now - began_s < limit_s, f"{self._open} requests have not ended after {limit_s} s"
        run.duration_s = self.now - began_s
        while self._heap:  # reports that are still on their way return the last pages
            self._next()
        for worker in self.workers.values():
            run.busy_s[worker.info.worker_id] += worker.busy_s
            run.steps += worker.steps
        return run

    def _next(self) -> None:
        self.now, _, call = heapq.heappop(self._heap)
        call()

    def _tick(self) -> None:
        self._feed(Tick())
        if self._open:
            self.after(TICK_S, self._tick)

    def _arrive(self, index: int, asked: PromptRequest) -> None:
        assert isinstance(asked.prompt, TokenIds)
        outcome = self._run.outcomes[index]
        outcome.due_s = outcome.sent_s = outcome.end_s = self.now
        outcome.prompt_tokens = len(asked.prompt.token_ids)
        sampling = SamplingParams(max_tokens=asked.max_tokens, seed=index, ignore_eos=True)
        prompt = list(asked.prompt.token_ids)
        self._feed(RequestArrived(Request(RequestId(str(index)), GATEWAY, prompt, sampling, self._root)))

    def _deliver(self, worker: VirtualWorker, report: WorkerReport) -> None:
        """A worker's report is on its way; it is lost with the worker."""
        self.after(self._link_s, lambda: self._feed(self._event(worker, report)))

    def _event(self, worker: VirtualWorker, report: WorkerReport) -> Event:
        worker_id, epoch = worker.info.worker_id, worker.info.epoch
        if isinstance(report, StepReport):
            return StepReported(worker_id, epoch, report)
        return PullReported(worker_id, epoch, report)

    def _feed(self, event: Event) -> None:
        for command in self.engine.handle(event, self.now):
            match command:
                case DispatchPlan(worker_id, epoch, plan):
                    worker = self.workers.get(worker_id)
                    if worker is not None and worker.info.epoch == epoch:
                        self.after(self._link_s, lambda w=worker, p=plan: w.submit(p))  # type: ignore[misc]
                case PublishReply(_, TokensReply(request_id, _, position, tokens, _)):
                    index = int(request_id)
                    got = self._run.tokens[index]
                    assert position == len(got), f"request {index}: token {position} after {len(got)}"
                    got += tokens
                    self._run.outcomes[index].token_event_times_s += [self.now] * len(tokens)
                case FinishRequest():
                    self._finished(command)
                case _:
                    pass

    def _finished(self, finish: FinishRequest) -> None:
        index, stats = int(finish.request_id), finish.terminal.stats
        self._run.transfers += finish.timeline.transfers
        self._open -= 1
        self._run.terminals[index] += 1
        outcome = self._run.outcomes[index]
        outcome.end_s = self.now
        outcome.cached_tokens, outcome.completion_tokens = stats.cached_tokens, stats.output_tokens
        code = finish.terminal.error_code
        outcome.result, outcome.reason = (Result.OK, "") if code is None else (Result.ERROR, code)


def timed(requests: Sequence[PromptRequest], arrivals_s: Sequence[float]) -> list[PromptRequest]:
    """The requests, each with its time."""
    return [replace(request, at_s=at_s) for request, at_s in zip(requests, arrivals_s, strict=True)]


def new_engine(config: BatchingConfig, *, seed: int) -> Engine:
    """As the service makes it."""
    return Engine(config, no_worker_grace_s=4.0, routing_seed=seed, fence=Fence(1))
