"""Drives an Engine and its PagedWorkers to the end, keeping everything that was commanded and published."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from kvstore.prefix_hash import namespace, root_hash
from scheduler.commands import Command, DispatchPlan, FinishRequest, PublishReply
from scheduler.engine import Engine
from scheduler.events import Event, Request, RequestArrived, WorkerUp
from scheduler.policy.step_time import StepWork
from tests.engine.paged_worker import CARD, PagedWorker
from wire.config import BatchingConfig
from wire.entries import TokensReply
from wire.ids import Fence, GatewayId, RequestId, WorkerId
from wire.plan import Role, StepPlan
from wire.sampling import SamplingParams

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
        page_size: int = 16,
        workers: int = 1,
        step_us: Callable[[StepWork], float] = lambda work: 1000.0,
        roles: Sequence[Role] | None = None,
        pulls: bool = False,
        tier_units: int = 0,
        prompt_ranges: Sequence[tuple[int, int]] = (),
        **config: Any,
    ) -> None:
        self.config = BatchingConfig(
            **{"step_token_budget": 64, "min_chunk_tokens": 8, "kv_watermark": 0.0, "itl_target_ms": inf, **config}
        )
        self.engine = Engine(self.config, no_worker_grace_s=4.0, routing_seed=0, fence=Fence(1))
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.outputs: defaultdict[str, list[int]] = defaultdict(list)
        self.finished: dict[str, FinishRequest] = {}
        self.workers: dict[WorkerId, PagedWorker] = {}
        for i in range(len(roles) if roles else workers):
            self.workers[WorkerId(f"w{i}")] = PagedWorker(
                f"w{i}",
                pages,
                page_size,
                self.config.step_token_budget,
                step_us=step_us,
                role=roles[i] if roles else Role.BOTH,
                peers=self.workers if pulls or roles or tier_units else None,
                tier_units=tier_units,
                prompt_range=prompt_ranges[i] if prompt_ranges else (0, 0),
            )
        for worker in self.workers.values():
            self.feed(WorkerUp(worker.info, []))

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
        return commands

    def arrive(self, name: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> list[Command]:
        return self.feed(RequestArrived(make_request(name, prompt, max_tokens, **fields)))

    def step(self) -> None:
        """One step on every worker, and every pull; reports are delivered at once."""
        for worker in self.workers.values():
            worker.run_step()
            for pull_id in list(worker.pulls):
                worker.finish_pull(pull_id)
            self.deliver(worker)

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
