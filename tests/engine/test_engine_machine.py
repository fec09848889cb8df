"""The engine against workers that check every KV slot, under any order of events."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.prefix_hash import namespace, root_hash
from scheduler.commands import DispatchPlan, FinishRequest, PublishReply, UpdateIndex
from scheduler.engine import Engine
from scheduler.events import (
    CancelRequested,
    Event,
    Request,
    RequestArrived,
    ResidencyAudited,
    RoleChanged,
    StepReported,
    Tick,
    TierChanged,
    WorkerDown,
    WorkerUp,
)
from tests.engine.books import (
    every_page_in_use_is_held_by_somebody,
    what_is_kept_up_to_date_is_what_a_scan_would_find,
    whoever_has_something_to_say_says_it,
)
from tests.engine.paged_tiers import PagedRedis
from tests.engine.paged_worker import CARD, VOCAB, PagedWorker, expected_output
from wire.config import BatchingConfig
from wire.entries import ChoiceReply, TerminalReply, TokensReply
from wire.ids import Epoch, Fence, GatewayId, PlanId, RequestId, UnitHash, WorkerId
from wire.plan import LOWER_TIERS, Role, StepReport, Tier
from wire.sampling import SamplingParams

ROOT = root_hash(namespace(CARD))
SHARED_PREFIXES = [[random.Random(i).randrange(2, VOCAB) for _ in range(300)] for i in range(2)]


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
        page_sizes=st.sampled_from([[16, 16, 16], [64, 64, 64], [16, 64, 16], [64, 16, 64]]),
        pages=st.integers(3, 24),
        itl_target_ms=st.sampled_from([math.inf, 5.0, 40.0]),
        max_running=st.sampled_from([None, 3, 20]),
        roles=st.sampled_from(
            [
                [Role.BOTH],
                [Role.BOTH, Role.BOTH],
                [Role.BOTH, Role.BOTH, Role.BOTH],
                [Role.PREFILL, Role.DECODE],
                [Role.PREFILL, Role.BOTH, Role.DECODE],
                [Role.PREFILL, Role.DECODE, Role.DECODE],
                [Role.PREFILL, Role.PREFILL, Role.DECODE],
            ]
        ),
        prompt_ranges=st.sampled_from(
            [
                [(0, 0), (0, 0), (0, 0)],
                [(0, 0), (0, 0), (0, 0)],
                [(0, 80), (81, 0), (0, 0)],
                [(0, 0), (0, 100), (50, 200)],
            ]
        ),
        the_lost_stay_lost=st.booleans(),
        tier_units=st.sampled_from([0, 0, 6, 40]),
        redis_units=st.sampled_from([0, 10, 60]),
        routing=st.sampled_from(["precise", "precise", "precise", "approximate", "least_loaded", "random"]),
        pull_lease_ms=st.sampled_from([50, 10_000]),
    )
    def start(
        self,
        budget: int,
        lease: int,
        queued: int,
        grace_s: float,
        page_sizes: list[int],
        pages: int,
        itl_target_ms: float,
        max_running: int | None,
        roles: list[Role],
        prompt_ranges: list[tuple[int, int]],
        the_lost_stay_lost: bool,
        tier_units: int,
        redis_units: int,
        routing: str,
        pull_lease_ms: int,
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
            routing=routing,
            pull_lease_ms=pull_lease_ms,
        )
        self.engine = Engine(self.config, no_worker_grace_s=self.grace_s, routing_seed=3, fence=Fence(5))
        self.now = 0.0
        self.page_sizes, self.num_pages = page_sizes, pages
        self.prompt_ranges, self.tier_units = prompt_ranges, tier_units
        self.redis = PagedRedis(redis_units) if redis_units and tier_units else None
        self.the_lost_stay_lost = the_lost_stay_lost
        self.indexed: defaultdict[tuple[WorkerId, Epoch, Tier], set[UnitHash]] = defaultdict(set)
        self.workers: dict[WorkerId, PagedWorker] = {}
        self.down: list[PagedWorker] = []
        self.clients: dict[RequestId, Client] = {}
        self.delivered: list[Event] = []
        self.cancelled_early: set[RequestId] = set()
        self.epochs = 1
        for index, role in enumerate(roles):
            self.bring_up(self.new_worker(f"w{index}", role))

    # -- plumbing --

    def new_worker(self, worker_id: str, role: Role) -> PagedWorker:
        index = int(worker_id[1:])
        return PagedWorker(
            worker_id,
            self.num_pages,
            self.page_sizes[index],
            self.config.step_token_budget,
            epoch=self.epochs,
            step_us=lambda work: 2000.0 + 700.0 * work.tokens + 2.0 * work.chunk_pairs,
            role=role,
            peers=self.workers,
            tier_units=self.tier_units,
            redis=self.redis,
            prompt_range=self.prompt_ranges[index],
        )

    def bring_up(self, worker: PagedWorker) -> None:
        self.workers[worker.info.worker_id] = worker
        self.feed(WorkerUp(worker.info, worker.residents(), worker.tiers()))

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
                case UpdateIndex(worker_id, epoch, tier, stored, dropped, fresh):
                    if fresh:
                        for key in [key for key in self.indexed if key[0] == worker_id]:
                            del self.indexed[key]
                    self.indexed[worker_id, epoch, tier] -= set(dropped)
                    self.indexed[worker_id, epoch, tier] |= set(stored)

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
        shared=st.one_of(st.integers(0, 90), st.integers(0, 300)),
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
            event = worker.event(worker.reports.popleft())
            if not isinstance(event, TierChanged):  # repeated, it would say what was, not what is
                self.delivered.append(event)
            self.feed(event)

    @precondition(lambda self: self.delivered)
    @rule(data=st.data())
    def repeat_an_old_report(self, data: st.DataObject) -> None:
        self.feed(data.draw(st.sampled_from(self.delivered[-20:])))

    @precondition(lambda self: any(w.pulls for w in self.workers.values()))
    @rule(data=st.data(), most_units=st.sampled_from([None, None, None, 0, 1, 3]))
    def a_pull_ends(self, data: st.DataObject, most_units: int | None) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.pulls]))
        worker.finish_pull(data.draw(st.sampled_from(list(worker.pulls))), most_units)

    @precondition(lambda self: any(w.pulls for w in self.workers.values()))
    @rule(data=st.data())
    def a_pull_goes_on(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.pulls]))
        worker.renew_pull(data.draw(st.sampled_from(list(worker.pulls))))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), role=st.sampled_from(Role))
    def an_operator_changes_a_role(self, data: st.DataObject, role: Role) -> None:
        self.feed(RoleChanged(data.draw(st.sampled_from(list(self.workers))), role))

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
            worker = self.new_worker(worker.info.worker_id, worker.info.role)
        self.down.append(worker)

    @precondition(lambda self: any(w.reports for w in self.workers.values()))
    @rule(data=st.data())
    def a_step_fails(self, data: st.DataObject) -> None:
        """The worker reports the failure, drops everything and comes back with a new epoch."""
        worker = data.draw(st.sampled_from([w for w in self.workers.values() if w.reports]))
        info = worker.info
        last = next((r.plan_id for r in reversed(worker.reports) if isinstance(r, StepReport)), PlanId(1))
        failed = StepReport(last, 0, True, [], failure="boom")
        del self.workers[info.worker_id]
        self.feed(StepReported(info.worker_id, info.epoch, failed))
        self.feed(WorkerDown(info.worker_id, info.epoch, "the stream ended"))
        self.epochs += 1
        self.bring_up(self.new_worker(info.worker_id, info.role))

    @precondition(lambda self: self.down)
    @rule()
    def bring_a_worker_back(self) -> None:
        self.bring_up(self.down.pop())

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def an_audit_compares(self, data: st.DataObject) -> None:
        """Even while changes are on their way, when it should not."""
        self.audit(data.draw(st.sampled_from(list(self.workers.values()))))

    def audit(self, worker: PagedWorker) -> int:
        """Returns how many units differ."""
        info = worker.info
        held = {
            Tier.DEVICE: {unit for page in worker.residents() for unit in page.unit_hashes},
            **{t: {u for units in worker.tiers() if units.tier is t for u in units.stored} for t in LOWER_TIERS},
        }
        twin = self.engine.twin.units(info.worker_id)
        differing = {tier: frozenset(held[tier] ^ twin[tier]) for tier in held}
        self.feed(ResidencyAudited(info.worker_id, info.epoch, worker.residents(), worker.tiers(), differing))
        return sum(map(len, differing.values()))

    @rule(passed_s=st.sampled_from([0.0, 0.0, 0.1, 6.0]))
    def tick(self, passed_s: float) -> None:
        self.now += passed_s
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
    def the_engines_books_are_right(self) -> None:
        if hasattr(self, "engine"):
            every_page_in_use_is_held_by_somebody(self.engine)
            whoever_has_something_to_say_says_it(self.engine)
            what_is_kept_up_to_date_is_what_a_scan_would_find(self.engine)

    @invariant()
    def the_twin_and_the_index_hold_what_was_computed(self) -> None:
        if not hasattr(self, "engine"):
            return
        for worker_id, view in self.engine._workers.items():
            twin = self.engine.twin.units(worker_id)
            assert (
                twin[Tier.DEVICE] == set(view.pool.computed_units()) == self.indexed[worker_id, view.epoch, Tier.DEVICE]
            )
            for tier in (Tier.HOST, Tier.REDIS):
                assert twin[tier] == self.indexed[worker_id, view.epoch, tier]
        assert len(self.engine._placing.prefixes.shared) <= (self.redis.max_units if self.redis else 0)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        while self.down and not (self.workers and self.the_lost_stay_lost):
            self.bring_up(self.down.pop())
        self.run_until_idle()
        for client in self.clients.values():
            self.check_finished(client)
        stats = self.engine.stats()
        assert stats.waiting == stats.running == 0
        assert all(w.pages.in_use == w.pages.retiring == 0 for w in stats.workers), "pages leaked"
        assert all(w.num_pulling == 0 for w in stats.workers)
        for worker in self.workers.values():
            self.audit(worker)
        self.run_until_idle()
        assert not any(self.audit(worker) for worker in self.workers.values()), "the index drifts"

    def run_until_idle(self) -> None:
        for _ in range(20_000):  # nothing but steps, reports and ticks: whoever waits for more waits for ever
            self.feed(Tick())
            for worker in self.workers.values():
                worker.run_step()
                for pull_id in list(worker.pulls):
                    worker.finish_pull(pull_id)
                while worker.reports:
                    self.feed(worker.event(worker.reports.popleft()))
            if all(w.is_idle for w in self.workers.values()):
                break


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
