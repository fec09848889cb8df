"""Drives an Engine and its PagedWorkers to the end, keeping everything that was commanded and published."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from kvstore.page_pool import PoolCounts
from kvstore.prefix_hash import namespace, root_hash
from scheduler.commands import Command, DispatchPlan, FinishRequest, PublishReply, UpdateIndex
from scheduler.engine import Engine
from scheduler.events import Event, Request, RequestArrived, Tick, WorkerDown, WorkerUp
from scheduler.policy.step_time import StepWork
from tests.engine.paged_tiers import PagedRedis
from tests.engine.paged_worker import CARD, PagedWorker
from wire.config import BatchingConfig
from wire.entries import TokensReply
from wire.ids import Fence, GatewayId, RequestId, WorkerId
from wire.plan import Role, StepPlan
from wire.sampling import SamplingParams


def prompt(length: int, salt: int = 0) -> list[int]:
    return [2 + (i * 7 + salt * 13) % 40 for i in range(length)]


def slow(work: StepWork) -> float:
    """µs of a step: prefilling so slowly that KV is worth pulling."""
    return 2000.0 + 700.0 * work.tokens


ROOT = root_hash(namespace(CARD))


def make_request(name: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Request:
    return Request(
        request_id=RequestId(name),
        gateway_id=GatewayId("g"),
        prompt=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True),
        root_hash=ROOT,
        **fields,
    )


class Driver:
    def __init__(
        self,
        *,
        pages: int = 32,
        page_size: int | Sequence[int] = 16,
        workers: int = 1,
        step_us: Callable[[StepWork], float] = lambda work: 1000.0,
        roles: Sequence[Role] | None = None,
        pulls: bool = False,
        tier_units: int = 0,
        redis: PagedRedis | None = None,
        prompt_ranges: Sequence[tuple[int, int]] = (),
        routing_seed: int = 0,
        **config: Any,
    ) -> None:
        self.config = BatchingConfig(
            **{"step_token_budget": 64, "min_chunk_tokens": 8, "kv_watermark": 0.0, "itl_target_ms": inf, **config}
        )
        self.engine = Engine(self.config, no_worker_grace_s=4.0, routing_seed=routing_seed, fence=Fence(1))
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.outputs: defaultdict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, FinishRequest] = {}
        self.index_updates: list[UpdateIndex] = []
        self.workers: dict[WorkerId, PagedWorker] = {}
        for i in range(len(roles) if roles else workers):
            self.workers[WorkerId(f"w{i}")] = PagedWorker(
                f"w{i}",
                pages,
                page_size if isinstance(page_size, int) else page_size[i],
                self.config.step_token_budget,
                step_us=step_us,
                role=roles[i] if roles else Role.BOTH,
                peers=self.workers if pulls or roles or tier_units else None,
                tier_units=tier_units,
                redis=redis,
                prompt_range=prompt_ranges[i] if prompt_ranges else (0, 0),
            )
        for worker in list(self.workers.values()):
            self.join(worker)

    @property
    def worker(self) -> PagedWorker:
        return next(iter(self.workers.values()))

    def feed(self, event: Event) -> list[Command]:
        self.now += 0.001
        commands = self.engine.handle(event, self.now)
        for command in commands:
            match command:
                case DispatchPlan(worker_id, epoch, plan):
                    self.plans.append(plan)
                    worker = self.workers.get(worker_id)
                    if worker is not None and worker.info.epoch == epoch:
                        worker.plans.append(plan)
                case PublishReply(_, TokensReply() as reply):
                    self.outputs[f"{reply.request_id}/{reply.choice}"] += reply.tokens
                case FinishRequest(_, request_id, _, _):
                    assert request_id not in self.finished
                    self.finished[request_id] = command
                case UpdateIndex():
                    self.index_updates.append(command)
        return commands

    def arrive(self, name: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> list[Command]:
        return self.feed(RequestArrived(make_request(name, prompt, max_tokens, **fields)))

    def step(self, *, end_pulls: bool = True) -> None:
        """One step on every worker, and every pull unless they are to go on; reports are delivered at once."""
        for worker in list(self.workers.values()):
            worker.run_step()
            for pull_id in list(worker.pulls) if end_pulls else ():
                worker.finish_pull(pull_id)
            self.deliver(worker)

    def step_until(self, is_so: Callable[[], object], *, end_pulls: bool = False) -> None:
        """Step until something is so; pulls go on meanwhile."""
        for _ in range(500):
            if is_so():
                return
            self.step(end_pulls=end_pulls)
        raise AssertionError("it never came to that")

    def join(self, worker: PagedWorker) -> None:
        """It comes up, with whatever it holds."""
        self.workers[worker.info.worker_id] = worker
        self.feed(WorkerUp(worker.info, worker.residents(), worker.tiers()))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    def lose(self, worker: PagedWorker) -> None:
        """It is gone for good."""
        del self.workers[worker.info.worker_id]
        self.feed(WorkerDown(worker.info.worker_id, worker.info.epoch, "killed"))

    def pages(self, worker: PagedWorker) -> PoolCounts:
        """As the engine accounts for them."""
        return next(w.pages for w in self.engine.stats().workers if w.worker_id == worker.info.worker_id)

    def assert_done(self, *names: str) -> None:
        """These requests have ended well, and nothing is held by anybody."""
        for name in names:
            assert self.finished[name].terminal.error_code is None
        stats = self.engine.stats()
        assert stats.waiting == stats.running == 0
        assert all(w.pages.in_use == w.pages.retiring == w.num_pulling == 0 for w in stats.workers)

    def deliver(self, worker: PagedWorker) -> None:
        while worker.reports:
            self.feed(worker.event(worker.reports.popleft()))

    def run(self, steps: int = 5000) -> None:
        """Step until every worker is idle."""
        for _ in range(steps):
            if all(w.is_idle for w in self.workers.values()):
                return
            self.step()
        raise AssertionError("the workers never became idle")
