"""A pipelined runner's steps overlap, and give the tokens, ends and reports of one that is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpu_worker.batching import StepEntry, build_batch, step_ahead
from gpu_worker.model_port import PipelinedRunner
from tests.gpu.pipelined_fake import PipelinedFakeRunner
from tests.worker.fake_runner import CARD, FakeRunner, reference_output
from tests.worker.plans import chunk, copy, decode, grant, greedy, live, plan, release
from tests.worker.test_executor import PROMPT, Gate, finish_of, running, tokens_of
from wire.plan import Progress, StepPlan, StepReport
from wire.sampling import FinishReason, SamplingParams


def entry(tokens: Sequence[int], *, granted: int = 100, sampling: SamplingParams | None = None) -> StepEntry:
    """A decode of the last of `tokens`, all output but the first."""
    sequence = live(tokens, 1, sampling=sampling)
    sequence.granted_slots, sequence.block_table = granted, [3, 4, 5, 6, 7, 8, 9]  # type: ignore[list-item]
    return StepEntry(sequence, len(tokens) - 1, len(tokens), is_prefill=False)


def test_the_step_ahead_takes_its_tokens_from_the_rows_of_the_one_before() -> None:
    entries = [entry([1, 2]), StepEntry(entry([1, 2, 3, 4]).sequence, 0, 2, is_prefill=True), entry([5, 6, 7])]
    ahead = step_ahead(entries, CARD)
    assert [(e.start, e.end, e.fed_by) for e in ahead] == [(2, 3, 0), (3, 4, 1)]
    batch = build_batch(ahead, 16)
    assert (batch.token_ids, batch.fed_rows) == ([0, 0], [(0, 0), (1, 1)])
    assert (batch.positions, batch.slot_mapping, batch.context_lens) == ([2, 3], [3 * 16 + 2, 3 * 16 + 3], [3, 4])
    assert batch.logit_rows == [0, 1]


def test_what_surely_ends_is_not_stepped_ahead() -> None:
    # Three tokens now, a fourth drawn by the step under way: it needs a fourth slot and a third place in the output.
    assert [e.fed_by for e in step_ahead([entry([1, 2, 3], granted=3), entry([1, 2, 3], granted=4)], CARD)] == [1]
    assert step_ahead([entry([1, 2, 3], sampling=greedy(3))], CARD) == []
    assert len(step_ahead([entry([1, 2, 3], sampling=greedy(4))], CARD)) == 1
    finished = entry([1, 2, 3])
    finished.sequence.finish_reason = FinishReason.STOP
    assert [e.fed_by for e in step_ahead([finished, entry([1, 2])], CARD)] == [1]


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_penalties_need_the_tokens_on_the_host(penalty: str) -> None:
    assert step_ahead([entry([1, 2]), entry([1, 2], sampling=replace(greedy(), **{penalty: 0.5}))], CARD) == []


def untimed(reports: Sequence[StepReport]) -> list[tuple[int, int, bool, list[Progress]]]:
    return [(r.plan_id, r.step, r.plan_done, r.progress) for r in reports]


STOP = reference_output(PROMPT, 6)[3]
PLANS: list[StepPlan] = [
    plan(1, chunks=[chunk(1, 0, 23, tokens=PROMPT, pages=grant([3, 1, 7, 5, 2, 6], 90))]),
    plan(
        2,
        chunks=[
            chunk(1, 23, 17),
            chunk(2, 0, 40, tokens=PROMPT, pages=grant([13, 11, 17, 15], 64), sampling=greedy(stop_token_ids=(STOP,))),
            chunk(3, 0, 8, tokens=PROMPT[:8], pages=grant([20, 21], 32), sampling=greedy(3)),
            chunk(4, 0, 9, tokens=PROMPT[:9], pages=grant([22], 13), sampling=SamplingParams(50, seed=9, min_tokens=9)),
        ],
        max_steps=10,
    ),
    plan(3, releases=[release(4)], copies=[copy(3, 40, 16)], max_steps=0),
    plan(4, decodes=[decode(1), decode(2)], max_steps=7),
]


async def test_reports_are_those_of_a_runner_that_does_one_step_at_a_time() -> None:
    runner = PipelinedFakeRunner()
    assert isinstance(runner, PipelinedRunner)
    async with running(FakeRunner()) as (_, client):
        expected = [report for one in PLANS for report in await client.run(one)]
    async with running(runner) as (_, client):
        actual = [report for one in PLANS for report in await client.run(one)]
    assert untimed(actual) == untimed(expected)
    assert runner.steps_ahead == 9 + 6  # all but each plan's first
    assert tokens_of(actual, 1) == reference_output(PROMPT, 17)
    assert finish_of(actual, 2) is FinishReason.STOP


async def test_what_was_stepped_ahead_of_a_stop_is_dropped() -> None:
    runner = PipelinedFakeRunner()
    async with running(runner) as (_, client):
        sampling = greedy(stop_token_ids=(STOP,))
        first = chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48), sampling=sampling)
        reports = await client.run(plan(1, chunks=[first], max_steps=9))
        assert tokens_of(reports, 1) == reference_output(PROMPT, 4)
        assert [r.plan_done for r in reports] == [False, False, False, True]
        assert len(runner.batches) == 5  # one too many, its result never read
        # The next plan starts as if it had not been.
        reports = await client.run(plan(2, chunks=[chunk(2, 0, 8, tokens=PROMPT[:8], pages=grant([3], 16))]))
        assert tokens_of(reports, 2) == reference_output(PROMPT[:8], 1)


async def test_a_newer_plan_is_not_stepped_ahead_of() -> None:
    runner, gate = PipelinedFakeRunner(), Gate()
    runner.before_forward = gate
    async with running(runner) as (_, client):
        await client.submit(plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))], max_steps=12))
        await gate.entered()
        await client.submit(plan(2, decodes=[decode(1)], max_steps=1))
        gate.leave(2)
        reports = [await client.report() for _ in range(2)]
        assert [(r.plan_id, r.step, r.plan_done) for r in reports] == [(1, 0, True), (2, 0, True)]


async def test_nan_logits_end_their_sequence_though_it_was_stepped_ahead() -> None:
    runner = PipelinedFakeRunner()
    runner.nan_after = {reference_output(PROMPT[:8], 2)[1]}
    async with running(runner) as (_, client):
        chunks = [
            chunk(1, 0, 8, tokens=PROMPT[:8], pages=grant([1], 16)),
            chunk(2, 0, 9, tokens=PROMPT[:9], pages=grant([2], 16)),
        ]
        reports = await client.run(plan(1, chunks=chunks, max_steps=5))
        assert finish_of(reports, 1) is FinishReason.ERROR
        assert tokens_of(reports, 1) == reference_output(PROMPT[:8], 2)
        assert tokens_of(reports, 2) == reference_output(PROMPT[:9], 5)


async def test_a_step_that_raises_while_ahead_voids_the_epoch() -> None:
    runner = PipelinedFakeRunner()

    async with running(runner) as (executor, client):
        steps = iter(range(3))

        def fail_third(batch: object) -> None:
            if next(steps) == 2:
                raise RuntimeError("device lost")

        runner.before_forward = fail_third
        first = chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))
        reports = await client.run(plan(1, chunks=[first], max_steps=9))
        assert [r.failure for r in reports] == [None, "RuntimeError: device lost"]
        assert executor.epoch == 101
