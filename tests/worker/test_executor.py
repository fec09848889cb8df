from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import assert_never

import pytest

from gpu_worker.executor import MAX_QUEUED_PLANS, Executor, PlanChannel, Snapshot, WorkerReport
from gpu_worker.model_port import ModelRunner
from gpu_worker.step_batch import StepBatch
from gpu_worker.telemetry import StepTelemetry
from kvstore.prefix_hash import chain
from observability.metrics import WorkerMetrics
from observability.tracing import NullTracer
from tests.worker.fake_runner import FakeRunner, reference_output
from tests.worker.plans import ROOT, chunk, copy, decode, grant, greedy, plan, release
from wire.ids import Epoch, PageId
from wire.plan import PageUnits, PullReport, StepPlan, StepReport, TierUnits
from wire.sampling import FinishReason, SamplingParams

TIMEOUT_S = 10.0
EPOCH = Epoch(100)
PROMPT = list(range(1, 41))


class Client:
    """One session with an executor, as the server has it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._reports: asyncio.Queue[StepReport] = asyncio.Queue()
        self._pull_reports: asyncio.Queue[PullReport] = asyncio.Queue()
        self._tier_units: asyncio.Queue[TierUnits] = asyncio.Queue()
        self.channel = PlanChannel(self._deliver)

    def _deliver(self, report: WorkerReport) -> None:
        match report:
            case StepReport():
                self._reports.put_nowait(report)
            case PullReport():
                self._pull_reports.put_nowait(report)
            case TierUnits():
                self._tier_units.put_nowait(report)
            case _:
                assert_never(report)

    async def open(self) -> Snapshot:
        return await asyncio.wait_for(self._executor.open(self.channel), TIMEOUT_S)

    async def submit(self, *plans: StepPlan) -> None:
        for step_plan in plans:
            await asyncio.wait_for(self._executor.submit(self.channel, step_plan), TIMEOUT_S)

    async def report(self) -> StepReport:
        return await asyncio.wait_for(self._reports.get(), TIMEOUT_S)

    async def pull_report(self) -> PullReport:
        return await asyncio.wait_for(self._pull_reports.get(), TIMEOUT_S)

    async def pulled(self) -> PullReport:
        """The next report that ends a pull."""
        while not (report := await self.pull_report()).done:
            pass
        return report

    async def tier_units(self) -> TierUnits:
        return await asyncio.wait_for(self._tier_units.get(), TIMEOUT_S)

    @property
    def has_no_report(self) -> bool:
        return self._reports.empty()

    async def run(self, step_plan: StepPlan) -> list[StepReport]:
        """Submit one plan and collect its reports."""
        await self.submit(step_plan)
        return await self.collect()

    async def collect(self) -> list[StepReport]:
        """Reports up to and with the next that ends a plan."""
        reports = [await self.report()]
        while not reports[-1].plan_done:
            reports.append(await self.report())
        return reports


class Gate:
    """Holds the compute thread inside a step: `entered` says it is there, `leave` lets it go on."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._leave = threading.Semaphore(0)

    def __call__(self, batch: StepBatch) -> None:
        self._entered.release()
        assert self._leave.acquire(timeout=TIMEOUT_S)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.acquire, timeout=TIMEOUT_S)

    def leave(self, steps: int = 1) -> None:
        self._leave.release(steps)


@asynccontextmanager
async def running(runner: ModelRunner, metrics: WorkerMetrics | None = None) -> AsyncIterator[tuple[Executor, Client]]:
    telemetry = StepTelemetry(metrics or WorkerMetrics(), NullTracer())
    async with Executor(runner, telemetry, epoch=EPOCH) as executor:
        client = Client(executor)
        assert await client.open() == Snapshot(EPOCH, [])
        yield executor, client


def tokens_of(reports: Sequence[StepReport], seq: int) -> list[int]:
    return [token for report in reports for p in report.progress if p.seq_id == seq for token in p.tokens]


def finish_of(reports: Sequence[StepReport], seq: int) -> FinishReason | None:
    return next((p.finish_reason for r in reports for p in r.progress if p.seq_id == seq and p.finish_reason), None)


@pytest.mark.parametrize("page_size", [16, 64])
async def test_chunked_batched_output_is_what_an_unbroken_run_gives(page_size: int) -> None:
    pages = [3, 1, 7, 5, 2, 6][: 96 // page_size + 1]
    others = [p + 10 for p in pages]
    async with running(FakeRunner(page_size=page_size)) as (_, client):
        reports = await client.run(plan(1, chunks=[chunk(1, 0, 23, tokens=PROMPT, pages=grant(pages, 90))]))
        assert [p.tokens for p in reports[0].progress] == [[]]
        assert reports[0].progress[0].num_computed == 23
        reports += await client.run(
            plan(
                2,
                chunks=[chunk(1, 23, 17), chunk(2, 0, 8, tokens=PROMPT[:8], pages=grant(others, 60))],
                max_steps=10,
            )
        )
        reports += await client.run(plan(3, decodes=[decode(2), decode(1)], max_steps=20))
        assert tokens_of(reports, 1) == reference_output(PROMPT, 30)
        assert tokens_of(reports, 2) == reference_output(PROMPT[:8], 30)


async def test_reports_carry_steps_progress_and_timing_in_order() -> None:
    async with running(FakeRunner()) as (_, client):
        reports = await client.run(
            plan(4, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))], max_steps=3)
        )
        assert [(r.plan_id, r.step, r.plan_done) for r in reports] == [(4, 0, False), (4, 1, False), (4, 2, True)]
        assert [r.progress[0].num_computed for r in reports] == [3, 4, 5]
        timings = [r.timing for r in reports if r.timing is not None]
        assert [(t.prefill_tokens, t.decode_tokens, t.context_tokens) for t in timings] == [
            (3, 0, 3),
            (0, 1, 4),
            (0, 1, 5),
        ]
        assert all(t.started_unix_ns > 1e18 for t in timings)


async def test_a_plan_yields_after_the_running_step_when_a_newer_one_is_queued() -> None:
    runner, gate = FakeRunner(), Gate()
    runner.before_forward = gate
    async with running(runner) as (_, client):
        await client.submit(plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))], max_steps=12))
        await gate.entered()
        gate.leave()
        await gate.entered()  # in step 1
        await client.submit(plan(2, decodes=[decode(1)], max_steps=1))
        gate.leave(2)
        reports = [await client.report() for _ in range(3)]
        assert [(r.plan_id, r.step, r.plan_done) for r in reports] == [(1, 0, False), (1, 1, True), (2, 0, True)]


async def test_a_queued_plan_of_decodes_gives_its_step_to_a_newer_plan() -> None:
    runner, gate = FakeRunner(), Gate()
    runner.before_forward = gate
    async with running(runner) as (_, client):
        await client.submit(plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 8))], max_steps=12))
        await gate.entered()
        await client.submit(
            plan(2, decodes=[decode(1, grant([1], 16))], max_steps=16),
            plan(3, chunks=[chunk(2, 0, 2, tokens=[4, 5], pages=grant([2], 16))], decodes=[decode(1)], max_steps=1),
        )
        gate.leave(2)
        reports = [await client.report() for _ in range(3)]
        assert [(r.plan_id, r.step, r.plan_done) for r in reports] == [(1, 0, True), (2, 0, True), (3, 0, True)]
        assert [{p.seq_id for p in r.progress} for r in reports] == [{1}, set(), {1, 2}]
        gate.leave(16)  # and what the skipped plan granted holds
        rest = await client.run(plan(4, decodes=[decode(1)], max_steps=16))
        assert tokens_of(reports + rest, 1) == reference_output([1, 2, 3], 14)


async def test_a_plan_of_decodes_keeps_its_step_before_releases_alone() -> None:
    runner, gate = FakeRunner(), Gate()
    runner.before_forward = gate
    async with running(runner) as (_, client):
        await client.submit(plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))]))
        await gate.entered()
        await client.submit(plan(2, decodes=[decode(1)], max_steps=16), plan(3, releases=[release(9)], max_steps=0))
        gate.leave(3)
        reports = [await client.report() for _ in range(3)]
        assert [(r.plan_id, len(r.progress)) for r in reports] == [(1, 1), (2, 1), (3, 0)]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_plan_that_joins_shares_the_step_of_the_one_before_it_unless_that_has_begun(has_begun: bool) -> None:
    runner, gate, batches = FakeRunner(), Gate(), list[StepBatch]()

    def before_forward(batch: StepBatch) -> None:
        batches.append(batch)
        gate(batch)

    runner.before_forward = before_forward
    async with running(runner) as (_, client):
        await client.submit(plan(1, chunks=[chunk(9, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))], max_steps=1))
        await gate.entered()
        first = plan(2, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([2, 3, 4], 48))], decodes=[decode(9)])
        # Its first two pages are those that the chunk above writes.
        shares = chunk(2, 32, 8, tokens=PROMPT, pages=grant([2, 3, 5], 48))
        joining = plan(3, chunks=[shares], decodes=[decode(9), decode(1)], max_steps=4, joins=True)
        await client.submit(first)
        if has_begun:
            gate.leave()
            await gate.entered()
        await client.submit(joining)
        gate.leave(10)
        reports = [await client.report() for _ in range(2)]
        while not (reports[-1].plan_id == 3 and reports[-1].plan_done):
            reports.append(await client.report())
        assert [r.plan_id for r in reports[:3]] == [1, 2, 3]
        assert [len(batch.query_lens) for batch in batches[1:3]] == ([2, 3] if has_begun else [3, 3])
        assert tokens_of(reports, 1)[:4] == tokens_of(reports, 2)[:4] == reference_output(PROMPT, 4)


async def test_a_page_is_forgotten_before_its_next_owner_writes_it() -> None:
    async with running(FakeRunner()) as (executor, client):
        await client.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48))]))
        await client.run(plan(2, releases=[release(1)], max_steps=0))
        assert [page.page_id for page in executor.residency.pages()] == [1, 2]
        await client.run(plan(3, forgotten=[2], max_steps=0))
        assert [page.page_id for page in executor.residency.pages()] == [1]


async def test_a_lease_never_overruns_its_grant_and_resumes_with_the_next() -> None:
    async with running(FakeRunner()) as (_, client):
        reports = await client.run(
            plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 5))], max_steps=16)
        )
        assert [r.progress[0].num_computed for r in reports] == [3, 4, 5]
        reports += (blocked := await client.run(plan(2, decodes=[decode(1)], max_steps=16)))
        assert [(r.progress, r.timing) for r in blocked] == [([], None)]
        reports += await client.run(plan(3, decodes=[decode(1, grant([1], 8))], max_steps=16))
        assert reports[-1].progress[0].num_computed == 8
        assert tokens_of(reports, 1) == reference_output([1, 2, 3], 6)


async def test_a_sequence_stops_at_once_and_its_later_plans_are_ignored() -> None:
    output = reference_output(PROMPT, 5)
    async with running(FakeRunner()) as (_, client):
        sampling = greedy(stop_token_ids=(output[2],))
        first = chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48), sampling=sampling)
        second = chunk(2, 0, 40, tokens=PROMPT, pages=grant([4, 5, 6], 48), sampling=greedy(2))
        reports = await client.run(plan(1, chunks=[first, second], max_steps=9))
        assert tokens_of(reports, 1) == output[:3]
        assert tokens_of(reports, 2) == output[:2]
        assert finish_of(reports, 1) is FinishReason.STOP
        assert finish_of(reports, 2) is FinishReason.LENGTH
        assert len(reports) == 3  # nothing left to step
        late = await client.run(plan(2, decodes=[decode(1, grant([1, 2, 3], 48)), decode(2)], max_steps=4))
        assert [r.progress for r in late] == [[]]


async def test_releases_and_copies_run_without_a_step() -> None:
    async with running(FakeRunner()) as (executor, client):
        await client.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48))]))
        reports = await client.run(plan(2, releases=[release(1)], copies=[copy(1, 9, 16)], max_steps=0))
        assert reports == [StepReport(reports[0].plan_id, 0, plan_done=True, progress=[])]
        assert (await client.run(plan(3, decodes=[decode(1)])))[0].progress == []
        hashes = chain(ROOT, PROMPT)
        assert (await Client(executor).open()).residents == [
            PageUnits(PageId(1), hashes[:1]),
            PageUnits(PageId(2), hashes[1:]),
            PageUnits(PageId(9), hashes[:1]),
        ]


async def test_a_prefix_hit_inside_a_copied_page_gives_the_same_tokens() -> None:
    async with running(FakeRunner()) as (_, client):
        await client.run(plan(1, chunks=[chunk(1, 0, 32, tokens=PROMPT[:32], pages=grant([1, 2], 32))]))
        # A full-prompt hit: page 1 shared, page 2 copied, its last token computed again.
        hit = chunk(2, 31, 1, tokens=PROMPT[:32], pages=grant([1, 8, 9], 48))
        reports = await client.run(plan(2, copies=[copy(2, 8, 15)], chunks=[hit], max_steps=10))
        assert tokens_of(reports, 2) == reference_output(PROMPT[:32], 10)


async def test_a_resumed_sequence_continues_its_seeded_draws() -> None:
    sampling = SamplingParams(100, temperature=0.9, seed=5, ignore_eos=True)
    async with running(FakeRunner()) as (_, client):
        whole = await client.run(
            plan(
                1, chunks=[chunk(1, 0, 5, tokens=PROMPT[:5], pages=grant([1, 2], 32), sampling=sampling)], max_steps=12
            )
        )
        tokens = PROMPT[:5] + tokens_of(whole, 1)[:6]
        again = chunk(1, 0, 11, tokens=tokens, num_prompt=5, pages=grant([3, 4], 32), sampling=sampling, incarnation=1)
        resumed = await client.run(plan(2, releases=[release(1)], chunks=[again], max_steps=6))
        assert tokens_of(resumed, 1) == tokens_of(whole, 1)[6:]


async def test_nan_logits_end_their_sequence_only() -> None:
    runner = FakeRunner()
    runner.nan_after = {PROMPT[7]}
    async with running(runner) as (executor, client):
        chunks = [
            chunk(1, 0, 8, tokens=PROMPT[:8], pages=grant([1], 16)),
            chunk(2, 0, 9, tokens=PROMPT[:9], pages=grant([2], 16)),
        ]
        reports = await client.run(plan(1, chunks=chunks, max_steps=3))
        assert finish_of(reports, 1) is FinishReason.ERROR
        assert tokens_of(reports, 2) == reference_output(PROMPT[:9], 3)
        assert executor.epoch == EPOCH


async def test_a_refused_sequence_is_reported_with_the_plans_first_step() -> None:
    async with running(FakeRunner()) as (_, client):
        chunks = [
            chunk(1, 0, 8, tokens=PROMPT[:8], pages=grant([1], 7)),
            chunk(2, 0, 8, tokens=PROMPT[:8], pages=grant([2], 16)),
        ]
        reports = await client.run(plan(1, chunks=chunks))
        assert finish_of(reports, 1) is FinishReason.ERROR
        assert tokens_of(reports, 2) == reference_output(PROMPT[:8], 1)
        alone = await client.run(plan(2, chunks=[chunk(3, 5, 1, tokens=PROMPT[:8], pages=grant([3], 1))]))
        assert finish_of(alone, 3) is FinishReason.ERROR


async def test_a_step_that_raises_voids_the_epoch_and_the_worker_survives() -> None:
    runner, metrics = FakeRunner(), WorkerMetrics()
    async with running(runner, metrics) as (executor, client):
        await client.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48))]))

        def fail(batch: StepBatch) -> None:
            raise RuntimeError("device lost")

        runner.before_forward = fail
        reports = await client.run(plan(2, decodes=[decode(1)], max_steps=3))
        assert reports == [
            StepReport(reports[0].plan_id, 0, plan_done=True, progress=[], failure="RuntimeError: device lost")
        ]
        runner.before_forward = lambda batch: None
        # Its session is void: more plans than the queue holds, so that some have surely been taken, are ignored.
        await client.submit(*(plan(i, max_steps=0) for i in range(3, MAX_QUEUED_PLANS + 5)))
        successor = Client(executor)
        assert await successor.open() == Snapshot(Epoch(EPOCH + 1), [])
        assert client.has_no_report
        reports = await successor.run(plan(1, chunks=[chunk(1, 0, 8, tokens=PROMPT[:8], pages=grant([1], 16))]))
        assert tokens_of(reports, 1) == reference_output(PROMPT[:8], 1)
        assert metrics.registry.get_sample_value("phasemesh_worker_step_failures_total") == 1
        assert metrics.registry.get_sample_value("phasemesh_worker_epochs_total") == 2


async def test_a_new_session_waits_for_the_running_step_and_drops_queued_plans_and_sequences() -> None:
    runner, gate = FakeRunner(), Gate()
    runner.before_forward = gate
    async with running(runner) as (executor, client):
        await client.submit(
            plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48))], max_steps=5),
            plan(2, decodes=[decode(1)], max_steps=5),
        )
        await gate.entered()
        successor = Client(executor)
        opened = executor.open(successor.channel)
        executor.close(client.channel)  # the old session ends after it was replaced: harmless
        assert not opened.done()
        gate.leave()
        snapshot = await asyncio.wait_for(opened, TIMEOUT_S)
        assert [p.unit_hashes for p in snapshot.residents] == [[h] for h in chain(ROOT, PROMPT)]
        gate.leave(10)
        assert (await successor.run(plan(1, decodes=[decode(1)])))[0].progress == []


async def test_a_full_plan_queue_makes_submit_wait() -> None:
    runner, gate = FakeRunner(), Gate()
    runner.before_forward = gate
    async with running(runner) as (executor, client):
        await client.submit(plan(1, chunks=[chunk(1, 0, 1, tokens=[1], pages=grant([1], 16))]))
        await gate.entered()
        await client.submit(*(plan(i + 2, max_steps=0) for i in range(MAX_QUEUED_PLANS)))
        waiting = asyncio.ensure_future(executor.submit(client.channel, plan(99, max_steps=0)))
        done, _ = await asyncio.wait([waiting], timeout=0.05)
        assert not done
        gate.leave()
        await asyncio.wait_for(waiting, TIMEOUT_S)
        reports = [await client.report() for _ in range(MAX_QUEUED_PLANS + 2)]
        assert [r.plan_id for r in reports] == [*range(1, MAX_QUEUED_PLANS + 2), 99]


async def test_shutdown_finishes_the_running_step() -> None:
    runner, gate = FakeRunner(), Gate()
    runner.before_forward = gate
    async with running(runner) as (_, client):
        await client.submit(plan(1, chunks=[chunk(1, 0, 1, tokens=[1], pages=grant([1], 16))], max_steps=9))
        await gate.entered()
        asyncio.get_running_loop().call_later(0.05, gate.leave)
    assert tokens_of([await client.report()], 1) == reference_output([1], 1)
