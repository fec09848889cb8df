"""A worker in virtual time: plans, leases, grants and sequences are the worker's own code, a step is a delay.

What gpu_worker/executor.py does with a thread and a clock, this does with two calls: `after(delay_s, call)` is its
clock, `deliver(worker, report)` its stream. It draws no model's tokens: a token follows from seed and position. Its
pages hold what gpu_worker/simulated_kv.py writes: a sequence that finds KV of another in its own raises AssertionError.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from bench.virtual_pulls import After, Source, VirtualPuller
from gpu_worker.batching import PlanRun, StepEntry, build_batch
from gpu_worker.pulls import SessionPulls
from gpu_worker.residency import Residency
from gpu_worker.sequences import LiveSequence, SequenceTable
from gpu_worker.simulated_kv import SimulatedKv
from gpu_worker.step_cost import PullCost, StepCost
from wire.ids import PageId
from wire.plan import KvPull, Progress, PullReport, StepPlan, StepReport, StepTiming, WorkerInfo

WorkerReport: TypeAlias = StepReport | PullReport

FIRST_TOKEN_ID = 20_000
"""Output tokens are above those of bench/prefix_workloads.py's prompts."""


def predicted_token(seed: int, position: int, vocab_size: int) -> int:
    """Output token `position` of a request."""
    return FIRST_TOKEN_ID + (seed * 7919 + position * 104_729) % (vocab_size - FIRST_TOKEN_ID)


class VirtualWorker:
    """Runs plans in order, one step at a time, until `stop`."""

    def __init__(
        self,
        info: WorkerInfo,
        cost: StepCost,
        *,
        after: After,
        deliver: Callable[[VirtualWorker, WorkerReport], None],
        pull: PullCost | None = None,
        source_of: Callable[[KvPull], Source | None] = lambda pull: None,
    ) -> None:
        """pull: what one costs; None: it takes no KV. source_of: the worker a pull names, while it lives."""
        self.info = info
        self.busy_s = 0.0
        self.steps = 0
        self._kv = SimulatedKv(
            info.model.kv_dtype,
            num_pages=info.num_pages,
            page_size=info.page_size,
            max_positions=info.model.max_model_len,
        )
        self.pages = self._kv.pages
        self.residency = Residency(info.page_size, info.num_pages, generations=self.pages.generations)
        puller = None if pull is None else VirtualPuller(pull, self.pages, source_of, after)
        self._cost = cost
        self._after = after
        self._deliver = deliver
        self._pulls = SessionPulls(puller, self.residency, num_pages=info.num_pages, page_size=info.page_size)
        self._table = SequenceTable(
            info.model, num_pages=info.num_pages, page_size=info.page_size, on_grant=self._granted
        )
        self._plans: deque[StepPlan] = deque()
        self._is_running = False
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped

    def stop(self) -> None:
        """It is gone: what was under way reports nothing."""
        self._is_stopped = True

    def submit(self, plan: StepPlan) -> None:
        if self._is_stopped:
            return
        self._plans.append(plan)
        if not self._is_running:
            self._next_plan()

    def _next_plan(self) -> None:
        """Begin the oldest plan that has a step; those without are reported at once."""
        while self._plans and not self._is_running:
            plans = [self._plans.popleft()]
            while self._plans and self._plans[0].joins:
                plans.append(self._plans.popleft())
            runs = [self._begin(plan) for plan in plans]
            plan, run = plans[-1], runs[-1]
            entries: list[StepEntry] = []
            if plan.max_steps and not self._is_superseded(plans):
                entries = [entry for earlier in runs[:-1] for entry in earlier.chunks()] + run.first_step()
            if entries:
                self._begin_step(plans, run, 0, entries)
            else:
                for each, its_run in zip(plans, runs, strict=True):
                    self._deliver(self, StepReport(each.plan_id, 0, plan_done=True, progress=its_run.refused))

    def _begin(self, plan: StepPlan) -> PlanRun:
        self._move_pages(plan)
        return PlanRun(plan, self._table)

    def _move_pages(self, plan: StepPlan) -> None:
        """As in the executor: copies, then pulls begin, before grants."""
        self._pulls.cancel(plan.cancelled_pulls)
        self.residency.void(plan.forgotten_pages)
        self.residency.void(copy.target_page for copy in plan.page_copies)
        self._kv.copy(plan.page_copies)
        self.residency.copied(plan.page_copies)
        for pull in plan.kv_pulls:
            self._pulls.begin(pull, self._report_pull)

    def _report_pull(self, report: PullReport) -> None:
        if not self._is_stopped:
            self._deliver(self, report)

    def _granted(self, sequence: LiveSequence, first_index: int, pages: list[PageId]) -> None:
        self.residency.granted(pages, first_index, sequence.unit_hashes, sequence.num_computed)

    def _is_superseded(self, plans: list[StepPlan]) -> bool:
        """As in the executor: plans of decodes alone give their step to a newer plan that steps."""
        if any(plan.prefill_chunks or plan.page_copies for plan in plans):
            return False
        return any(newer.max_steps > 0 for newer in self._plans)

    def _begin_step(self, plans: list[StepPlan], run: PlanRun, step: int, entries: list[StepEntry]) -> None:
        timing = self._timing(entries)
        self.busy_s += timing.step_us * 1e-6
        self.steps += 1
        self._is_running = True
        self._kv.write(build_batch(entries, self.info.page_size))
        self._after(timing.step_us * 1e-6, lambda: self._end_step(plans, run, step, entries, timing))

    def _end_step(
        self, plans: list[StepPlan], run: PlanRun, step: int, entries: list[StepEntry], timing: StepTiming
    ) -> None:
        """`plans` share step 0; the last one's lease follows."""
        if self._is_stopped:
            return
        self._is_running = False
        progress = run.refused if step == 0 else []
        progress = progress + [self._advance(entry) for entry in entries]
        plan, following = plans[-1], run.next_step()
        for earlier in plans[:-1]:
            self._deliver(self, StepReport(earlier.plan_id, 0, plan_done=True, progress=[]))
        is_done = step + 1 == plan.max_steps or not following or bool(self._plans)
        self._deliver(self, StepReport(plan.plan_id, step, is_done, progress, timing))
        if is_done:
            self._next_plan()
        else:
            self._begin_step([plan], run, step + 1, following)

    def _timing(self, entries: list[StepEntry]) -> StepTiming:
        prefill_tokens = sum(entry.end - entry.start for entry in entries if entry.is_prefill)
        decode_tokens = sum(1 for entry in entries if not entry.is_prefill)
        context_tokens = sum(entry.end for entry in entries)
        step_us = self._cost.step_us(
            prefill_tokens=prefill_tokens, decode_tokens=decode_tokens, context_tokens=context_tokens
        )
        return StepTiming(0, 0, max(1, round(step_us)), 0, prefill_tokens, decode_tokens, context_tokens)

    def _advance(self, entry: StepEntry) -> Progress:
        sequence = entry.sequence
        if entry.is_prefill and entry.samples and (wrong := self._kv.first_wrong(sequence)) is not None:
            page = sequence.block_table[wrong // self.info.page_size]
            raise AssertionError(
                f"{self.info.worker_id}, request {sequence.request_id}: position {wrong} in page {page} is not its own"
            )
        sequence.advance(entry.end)
        self.residency.written(sequence.block_table, sequence.unit_hashes, entry.start, entry.end)
        progress = Progress(sequence.seq_id, sequence.incarnation, sequence.num_computed, tokens=[])
        if entry.samples:
            token = predicted_token(sequence.sampling.seed, sequence.num_output_tokens, self.info.model.vocab_size)
            sequence.token_ids.append(token)
            sequence.finish_reason = sequence.stop_reason(self.info.model)
            progress.tokens = [token]
            progress.finish_reason = sequence.finish_reason
            if sequence.finish_reason is not None:
                self._table.drop(sequence.seq_id, sequence.incarnation)
        return progress
