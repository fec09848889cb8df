"""The engine against workers that check every KV slot, under any order of events."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.prefix_hash import namespace, root_hash
from scheduler.commands import DispatchPlan, FinishRequest, PublishReply
from scheduler.engine import Engine
from scheduler.events import (
    CancelRequested,
    Event,
    Request,
    RequestArrived,
    StepReported,
    Tick,
    WorkerDown,
    WorkerUp,
)
from tests.engine.paged_worker import CARD, VOCAB, PagedWorker, expected_output
from wire.config import BatchingConfig
from wire.entries import ChoiceReply, TerminalReply, TokensReply
from wire.ids import Fence, GatewayId, RequestId, WorkerId
from wire.plan import StepReport
from wire.sampling import SamplingParams

ROOT = root_hash(namespace(CARD))
SHARED_PREFIXES = [[random.Random(i).randrange(2, VOCAB) for _ in range(90)] for i in range(2)]


@dataclass
class Client:
    """What one client would have seen."""

    request: Request
    outputs: list[list[int]]
    terminal: TerminalReply | None = None
    cancelled: bool = False


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        budget=st.sampled_from([2, 7, 32, 64]),
        lease=st.sampled_from([1, 4, 16]),
        queued=st.sampled_from([1, 2]),
        grace_s=st.sampled_from([0.05, 1000.0]),
        page_size=st.sampled_from([16, 64]),
        pages=st.integers(3, 14),
        workers=st.integers(1, 2),
        itl_target_ms=st.sampled_from([math.inf, 5.0, 40.0]),
        max_running=st.sampled_from([None, 3, 20]),
    )
    def start(
        self,
        budget: int,
        lease: int,
        queued: int,
        grace_s: float,
        page_size: int,
        pages: int,
        workers: int,
        itl_target_ms: float,
        max_running: int | None,
    ) -> None:
        self.grace_s = grace_s
        self.config = BatchingConfig(
            step_token_budget=budget,
            min_chunk_tokens=8,
            max_lease_steps=lease,
            max_queued_plans=queued,
            kv_watermark=0.1,
            itl_target_ms=itl_target_ms,
            max_running=max_running,
        )
        self.engine = Engine(self.config, no_worker_grace_s=self.grace_s, routing_seed=3, fence=Fence(5))
        self.now = 0.0
        self.page_size, self.num_pages = page_size, pages
        self.workers: dict[WorkerId, PagedWorker] = {}
        self.down: list[PagedWorker] = []
        self.clients: dict[RequestId, Client] = {}
        self.delivered: list[tuple[PagedWorker, StepReport]] = []
        self.cancelled_early: set[RequestId] = set()
        self.epochs = 1
        for index in range(workers):
            self.bring_up(self.new_worker(f"w{index}"))

    # -- plumbing --

    def new_worker(self, worker_id: str) -> PagedWorker:
        return PagedWorker(
            worker_id,
            self.num_pages,
            self.page_size,
            self.config.step_token_budget,
            epoch=self.epochs,
            step_us=lambda work: 2000.0 + 700.0 * work.tokens + 2.0 * work.chunk_pairs,
        )

    def bring_up(self, worker: PagedWorker) -> None:
        self.workers[worker.info.worker_id] = worker
        self.feed(WorkerUp(worker.info, worker.residents()))

    def feed(self, event: Event) -> None:
        self.now += 0.01
        for command in self.engine.handle(event, self.now):
            match command:
                case DispatchPlan(worker_id, epoch, plan):
                    worker = self.workers.get(worker_id)
                    if worker is not None and worker.info.epoch == epoch:
                        assert plan.fence == 5
                        worker.plans.append(plan)
                case PublishReply(_, TokensReply() as reply):
                    client = self.clients[reply.request_id]
                    assert client.terminal is None, "tokens after the terminal"
                    assert reply.position == len(client.outputs[reply.choice]), "a token lost or doubled"
                    client.outputs[reply.choice] += reply.tokens
                case PublishReply(_, ChoiceReply() as ended):
                    assert ended.num_tokens == len(self.clients[ended.request_id].outputs[ended.choice])
                case FinishRequest(_, request_id, terminal, _):
                    client = self.clients[request_id]
                    assert client.terminal is None, "two terminals"
                    client.terminal = terminal

    def check_finished(self, client: Client) -> None:
        assert client.terminal is not None, "never finished"
        request = client.request
        for choice, output in enumerate(client.outputs):
            expected = expected_output(request.prompt, request.sampling)
            if client.terminal.error_code is None and not client.cancelled:
                assert output == expected, f"choice {choice}"
            else:
                assert output == expected[: len(output)]

    # -- what may happen --

    @rule(
        prefix=st.integers(0, 1),
        shared=st.integers(0, 90),
        own=st.lists(st.integers(2, VOCAB - 1), max_size=30),
        max_tokens=st.integers(1, 60),
        tenant=st.sampled_from(["a", "b", "c"]),
        priority=st.integers(-1, 1),
        choices=st.sampled_from([1, 1, 1, 3]),
        ignore_eos=st.booleans(),
    )
    def arrive(
        self,
        prefix: int,
        shared: int,
        own: list[int],
        max_tokens: int,
        tenant: str,
        priority: int,
        choices: int,
        ignore_eos: bool,
    ) -> None:
        request = Request(
            request_id=RequestId(f"r{len(self.clients)}"),
            gateway_id=GatewayId("g"),
            prompt=(SHARED_PREFIXES[prefix][:shared] + own) or [2],
            sampling=SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=ignore_eos),
            root_hash=ROOT,
            num_choices=choices,
            tenant=tenant,
            priority=priority,
        )
        early = request.request_id in self.cancelled_early
        self.clients[request.request_id] = Client(request, [[] for _ in range(choices)], cancelled=early)
        self.feed(RequestArrived(request))

    @precondition(lambda self: any(not w.is_idle for w in self.workers.values()))
    @rule(data=st.data(), steps=st.integers(1, 6))
    def run_steps(self, data: st.DataObject, steps: int) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if not w.is_idle]))
        for _ in range(steps):
            worker.run_step()

    @precondition(lambda self: any(w.reports for w in self.workers.values()))
    @rule(data=st.data(), number=st.integers(1, 4))
    def deliver(self, data: st.DataObject, number: int) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.reports]))
        for _ in range(min(number, len(worker.reports))):
            report = worker.reports.popleft()
            self.delivered.append((worker, report))
            self.feed(StepReported(worker.info.worker_id, worker.info.epoch, report))

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def repeat_an_old_report(self, data: st.DataObject) -> None:
        worker, report = data.draw(st.sampled_from(self.delivered[-20:]))
        self.feed(StepReported(worker.info.worker_id, worker.info.epoch, report))

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), reason=st.sampled_from(["disconnect", "stop"]))
    def cancel(self, data: st.DataObject, reason: str) -> None:
        client = data.draw(st.sampled_from(list(self.clients.values())))
        choice = data.draw(st.sampled_from([None, *range(client.request.num_choices)]))
        client.cancelled = client.cancelled or client.terminal is None
        self.feed(CancelRequested(client.request.request_id, reason, choice))

    @rule()
    def cancel_overtakes_the_next_request(self) -> None:
        self.cancelled_early.add(RequestId(f"r{len(self.clients)}"))
        self.feed(CancelRequested(RequestId(f"r{len(self.clients)}"), "disconnect"))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), keeps_memory=st.booleans())
    def lose_a_worker(self, data: st.DataObject, keeps_memory: bool) -> None:
        worker = data.draw(st.sampled_from(list(self.workers.values())))
        del self.workers[worker.info.worker_id]
        self.feed(WorkerDown(worker.info.worker_id, worker.info.epoch, "test"))
        worker.reconnect()
        if not keeps_memory:
            self.epochs += 1
            worker = self.new_worker(worker.info.worker_id)
        self.down.append(worker)

    @precondition(lambda self: any(w.reports for w in self.workers.values()))
    @rule(data=st.data())
    def a_step_fails(self, data: st.DataObject) -> None:
        """The worker reports the failure, drops everything and comes back with a new epoch."""
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.reports]))
        info = worker.info
        failed = StepReport(worker.reports[-1].plan_id, 0, True, [], failure="boom")
        del self.workers[info.worker_id]
        self.feed(StepReported(info.worker_id, info.epoch, failed))
        self.feed(WorkerDown(info.worker_id, info.epoch, "the stream ended"))
        self.epochs += 1
        self.bring_up(self.new_worker(info.worker_id))

    @precondition(lambda self: self.down)
    @rule()
    def bring_a_worker_back(self) -> None:
        self.bring_up(self.down.pop())

    @rule()
    def tick(self) -> None:
        self.feed(Tick())

    @invariant()
    def pages_are_accounted_for(self) -> None:
        if not hasattr(self, "engine"):
            return
        for worker in self.engine.stats().workers:
            pages = worker.pages
            assert pages.free + pages.cached + pages.in_use + pages.retiring == worker.num_pages
            assert worker.running <= (self.config.max_running or self.config.step_token_budget)

    @invariant()
    def what_is_kept_up_to_date_is_what_a_scan_would_find(self) -> None:
        if not hasattr(self, "engine"):
            return
        for worker in self.engine._workers.values():
            running = worker.running.values()
            assert list(worker.prefilling) == [s.seq_id for s in running if s.is_prefilling]
            assert worker.decoding.keys() == {s.seq_id for s in running if not s.is_prefilling}
            assert worker.queued_prefill_tokens == sum(s.prefill_end - s.num_dispatched for s in running)
            assert all(s.granted_slots == len(s.pages) * worker.page_size for s in running)
            growing = [s for s in worker.decoding.values() if s.granted_slots < s.max_slots]
            left = {s.seq_id: s.granted_slots - s.next_position for s in growing}
            assert worker.renewable.keys() == {s for s in left if left[s] < worker.slots_ahead}
            assert worker.urgent.keys() == {s for s in left if left[s] <= worker.half_lease}
        assert self.engine._queue.waiting_tokens == sum(len(s.tokens) for s in self.engine._queue)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.down:
            self.bring_up(self.down.pop())
        for _ in range(20_000):
            for worker in self.workers.values():
                worker.run_step()
                while worker.reports:
                    self.feed(StepReported(worker.info.worker_id, worker.info.epoch, worker.reports.popleft()))
            if all(w.is_idle for w in self.workers.values()):
                break
        for client in self.clients.values():
            self.check_finished(client)
        stats = self.engine.stats()
        assert stats.waiting == stats.running == 0
        assert all(w.pages.in_use == w.pages.retiring == 0 for w in stats.workers), "pages leaked"


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
