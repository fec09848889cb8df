"""The compute thread: runs plans in order, one step at a time, and hands reports back to the event loop.

    event loop                    inbox (under a lock, for the hand-over only)         compute thread
      open / close    ─▸  Open          a session begins or ends: forget sequences  ─▸
      submit          ─▸  RunPlan       bounded per session                         ─▸   steps
      deliver  ◂────────────────────────  call_soon_threadsafe, in order  ◂───────────  StepReport
                                                                          ◂─ pulls ───  PullReport, from their threads
                                                                          ◂─ tiers ───  TierUnits

The thread alone touches the model and the sequences, and says who owns a page (residency.py). Anything newer in the
inbox makes the running plan yield after its step, and a plan of decodes alone takes none while a newer plan with steps
is queued. A pipelined runner (a GPU) is given the next step before this one's tokens are read:

    device  | step 0      | step 1      | step 2      |            fed by the tokens of the step before, on the device
    host      launch 1 ▸ read 0 ▸ launch 2 ▸ read 1 ▸ …            a plan that arrives meanwhile waits for one step more
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TypeAlias, assert_never

from gpu_worker.batching import PlanRun, StepEntry, build_batch, step_ahead
from gpu_worker.model_port import ModelRunner, PipelinedRunner, Sampled, StepOutput
from gpu_worker.pulls import SessionPulls
from gpu_worker.residency import Residency
from gpu_worker.sequences import LiveSequence, SequenceTable
from gpu_worker.step_watch import StepWatch
from gpu_worker.telemetry import StepTelemetry
from gpu_worker.transfer.port import LowerTiers, Puller
from wire.ids import Epoch, PageId
from wire.plan import PageUnits, Progress, PullReport, Residents, StepPlan, StepReport, StepTiming, TierUnits
from wire.sampling import FinishReason

log = logging.getLogger("gpu_worker.executor")

MAX_QUEUED_PLANS = 64
"""Per session. Full → submit waits, so the stream is not read and gRPC's flow control holds the scheduler."""
STOP_TIMEOUT_S = 5.0
"""A running step gets this long to end at shutdown."""

WorkerReport: TypeAlias = StepReport | PullReport | TierUnits
"""What a worker tells its scheduler."""


class PlanChannel:
    """One session's way to the executor. `deliver` is called in the event loop, report by report."""

    def __init__(self, deliver: Callable[[WorkerReport], None]) -> None:
        self.deliver = deliver
        self.free_places = asyncio.BoundedSemaphore(MAX_QUEUED_PLANS)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a new session starts from."""

    epoch: Epoch
    residents: list[PageUnits]
    tiers: list[TierUnits] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Open:
    channel: PlanChannel | None
    opened: asyncio.Future[Snapshot]


@dataclass(frozen=True, slots=True)
class _RunPlan:
    channel: PlanChannel
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


_Work: TypeAlias = _Open | _RunPlan | _Stop


class Executor:
    """`async with Executor(…) as executor`: the compute thread lives as long as the block.

    epoch: of this process's KV tensors; later ones, after a step that raised, count up from it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        telemetry: StepTelemetry,
        *,
        epoch: Epoch,
        puller: Puller | None = None,
        tiers: LowerTiers | None = None,
    ) -> None:
        self.runner = runner
        self._pipelined = runner if isinstance(runner, PipelinedRunner) else None
        self._telemetry = telemetry
        self._epoch = epoch
        self._tiers = tiers
        self.residency = Residency(
            runner.page_size,
            runner.num_pages,
            generations=None if runner.kv is None else runner.kv.generations,
            on_void=None if tiers is None else tiers.save,
        )
        self._pulls = SessionPulls(puller, self.residency, num_pages=runner.num_pages, page_size=runner.page_size)
        self._table = SequenceTable(
            runner.card,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            on_drop=telemetry.sequence_over,
            on_grant=self._granted,
        )
        self._inbox: deque[_Work] = deque()
        self._inbox_changed = threading.Condition()
        self._channel: PlanChannel | None = None  # of the session that is open, as the event loop sees it
        self._thread = threading.Thread(target=self._serve, name="compute", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Executor:
        self._loop = asyncio.get_running_loop()
        self._telemetry.epoch_began(after_failure=False)
        self._thread.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._replace_inbox(_Stop())
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("a step is still running after %s s; leaving it", STOP_TIMEOUT_S)

    @property
    def epoch(self) -> Epoch:
        """The current life of the KV tensors."""
        return self._epoch

    def residents(self) -> Residents:
        """What lies here now, beside whatever runs. From any thread; O(all units)."""
        return Residents(self.residency.pages(), [] if self._tiers is None else self._tiers.contents())

    def open(self, channel: PlanChannel) -> asyncio.Future[Snapshot]:
        """Make `channel` the one whose plans run, from now on; what an earlier one queued is dropped.

        The future is done when the running step has ended and its sequences are forgotten.
        """
        self._channel = channel
        opened: asyncio.Future[Snapshot] = self._loop.create_future()
        self._replace_inbox(_Open(channel, opened))
        return opened

    def close(self, channel: PlanChannel) -> None:
        """End a session: its plans and sequences are dropped, computed units stay. Harmless once replaced."""
        if self._channel is channel:
            self._channel = None
            self._replace_inbox(_Open(None, self._loop.create_future()))

    async def submit(self, channel: PlanChannel, plan: StepPlan) -> None:
        """Queue a plan; waits while the session has MAX_QUEUED_PLANS queued."""
        await channel.free_places.acquire()
        with self._inbox_changed:
            self._inbox.append(_RunPlan(channel, plan))
            self._inbox_changed.notify()

    def _replace_inbox(self, work: _Open | _Stop) -> None:
        with self._inbox_changed:
            self._inbox.clear()
            self._inbox.append(work)
            self._inbox_changed.notify()

    # Everything below runs in the compute thread.

    def _serve(self) -> None:
        channel: PlanChannel | None = None
        with self.runner.compute_thread():
            while True:
                match self._take():
                    case _Open(new_channel, opened):
                        self._forget_sequences()
                        self._pulls.end_all()
                        channel = new_channel
                        self._post(_resolve, opened, self._snapshot(channel))
                    case _RunPlan(owner, plan):
                        plans = [plan, *self._take_joining(owner)]
                        for _ in plans:
                            self._post(owner.free_places.release)
                        if owner is channel and not self._run_plans(owner, plans):
                            channel = None
                    case _Stop():
                        self._forget_sequences()
                        self._pulls.end_all()
                        return
                    case other:
                        assert_never(other)

    def _take(self) -> _Work:
        with self._inbox_changed:
            self._inbox_changed.wait_for(lambda: self._inbox)
            work = self._inbox.popleft()
            self._telemetry.set_queued_plans(len(self._inbox))
            return work

    def _take_joining(self, owner: PlanChannel) -> list[StepPlan]:
        """The queued plans that may share the step of the one just taken."""
        plans = []
        with self._inbox_changed:
            while self._inbox:
                work = self._inbox[0]
                if not (isinstance(work, _RunPlan) and work.channel is owner and work.plan.joins):
                    break
                plans.append(work.plan)
                self._inbox.popleft()
        return plans

    def _post(self, callback: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():  # closed: a step outlived STOP_TIMEOUT_S, and nobody listens
            self._loop.call_soon_threadsafe(callback, *args)

    def _snapshot(self, channel: PlanChannel | None) -> Snapshot:
        """Also makes `channel` the one that hears of the tiers below, from what is told here on."""

        def deliver(units: TierUnits) -> None:
            if channel is not None:
                self._post(channel.deliver, units)

        tiers = [] if self._tiers is None else self._tiers.subscribe(deliver)
        return Snapshot(self._epoch, self.residency.pages(), tiers)

    def _forget_sequences(self) -> None:
        self._table.clear()
        self._telemetry.set_sequences(0)

    def _run_plans(self, channel: PlanChannel, plans: list[StepPlan]) -> bool:
        """Run a plan's steps, a report each; those that join it share the first one, and the last one's lease follows.
        False: a step raised, and the epoch and its session are void."""
        plan, step = plans[-1], 0
        try:
            for report in self._steps(channel, plans):
                self._post(channel.deliver, report)
                step += report.plan_id == plan.plan_id
        except Exception as error:  # whatever the model raised: the worker outlives it, with nothing to trust
            log.exception("step failed", extra={"plan": plan.plan_id, "step": step, "epoch": self._epoch})
            self._forget_sequences()
            self._pulls.end_all()
            self.residency.clear()
            if self._tiers is not None:
                self._tiers.clear()
            self._epoch = Epoch(self._epoch + 1)
            self._telemetry.epoch_began(after_failure=True)
            failure = f"{type(error).__name__}: {error}"
            self._post(channel.deliver, StepReport(plan.plan_id, step, plan_done=True, progress=[], failure=failure))
            return False
        return True

    def _steps(self, channel: PlanChannel, plans: list[StepPlan]) -> Iterator[StepReport]:
        watch = StepWatch()
        plan = plans[-1]
        runs = [self._begin(channel, each) for each in plans]
        run = runs[-1]
        entries: list[StepEntry] = []
        if plan.max_steps and not self._is_superseded(plans):
            # The decodes of the last plan are those of all: a release since has taken its sequence out.
            entries = [entry for earlier in runs[:-1] for entry in earlier.chunks()] + run.first_step()
        progress = [refused for each in runs for refused in each.refused]
        if not entries:
            self._telemetry.set_sequences(len(self._table))
            for each in plans:
                yield StepReport(each.plan_id, 0, plan_done=True, progress=progress)
                progress = []
            return
        launched = self._launch(entries, watch)
        for step in range(plan.max_steps):
            ahead = self._launch_ahead(launched) if step + 1 < plan.max_steps else None
            stepped, timing = self._finish(launched)
            progress = progress + stepped
            if step == 0:
                for earlier in plans[:-1]:
                    yield StepReport(earlier.plan_id, 0, plan_done=True, progress=[])
            if ahead is None:
                entries = run.next_step()
                plan_done = step + 1 == plan.max_steps or not entries or bool(self._inbox)
            else:
                ahead.watch.restart()
                plan_done = not any(self._is_live(entry) for entry in ahead.entries)  # all stopped: it ran for nothing
            yield StepReport(plan.plan_id, step, plan_done, progress, timing)
            if plan_done:
                return
            progress, launched = [], ahead or self._launch(entries, StepWatch())

    def _is_superseded(self, plans: list[StepPlan]) -> bool:
        """Plans of decodes alone take no step when a newer plan that steps is queued: the step goes to the newer one,
        whose chunks came after they were sent, and decodes what still runs."""
        if any(plan.prefill_chunks or plan.page_copies for plan in plans):
            return False
        with self._inbox_changed:
            return any(isinstance(work, _RunPlan) and work.plan.max_steps > 0 for work in self._inbox)

    def _begin(self, channel: PlanChannel, plan: StepPlan) -> PlanRun:
        """All of a plan that comes before its steps."""
        self._move_pages(channel, plan)
        return PlanRun(plan, self._table)

    def _move_pages(self, channel: PlanChannel, plan: StepPlan) -> None:
        """Copies, then pulls begin: before grants, so that a sequence finds its units where these put them."""
        self._pulls.cancel(plan.cancelled_pulls)
        if plan.forgotten_pages:
            self.residency.void(plan.forgotten_pages)
        if plan.page_copies:
            self.residency.void(copy.target_page for copy in plan.page_copies)
            self.runner.copy_pages(plan.page_copies)
            self.residency.copied(plan.page_copies)
        for pull in plan.kv_pulls:
            self._pulls.begin(pull, partial(self._post, channel.deliver))

    def _granted(self, sequence: LiveSequence, first_index: int, pages: list[PageId]) -> None:
        self.residency.granted(pages, first_index, sequence.unit_hashes, sequence.num_computed)

    def _launch(self, entries: list[StepEntry], watch: StepWatch) -> _Launched:
        """Begin a step. A runner that is not pipelined runs it when its result is asked for."""
        batch = build_batch(entries, self.runner.page_size)
        watch.lap()
        sampling = [entry.sequence for entry in entries if entry.samples]
        if self._pipelined is not None:
            return _Launched(entries, sampling, watch, self._pipelined.launch(batch, sampling).result)
        return _Launched(entries, sampling, watch, partial(self.runner.step, batch, sampling))

    def _launch_ahead(self, launched: _Launched) -> _Launched | None:
        """The step after `launched`, begun before that one's tokens are read; a newer plan in the inbox comes first."""
        if self._inbox or self._pipelined is None:
            return None
        entries = step_ahead(launched.entries, self.runner.card)
        return self._launch(entries, StepWatch()) if entries else None

    def _finish(self, launched: _Launched) -> tuple[list[Progress], StepTiming]:
        """Wait for a step and account for it; what it ran of sequences that are over by now is dropped."""
        output = launched.result()
        launched.watch.lap()
        timing = launched.watch.timing(launched.entries, output)
        entries = [entry for entry in launched.entries if self._is_live(entry)]
        self._telemetry.step_done(entries, timing)
        drawn = {sequence.seq_id: one for sequence, one in zip(launched.sampling, output.sampled, strict=True)}
        progress = [self._advance(entry, drawn.get(entry.sequence.seq_id)) for entry in entries]
        self._telemetry.set_sequences(len(self._table))
        return progress, timing

    def _is_live(self, entry: StepEntry) -> bool:
        sequence = entry.sequence
        return self._table.find(sequence.seq_id, sequence.incarnation) is sequence

    def _advance(self, entry: StepEntry, sampled: Sampled | None) -> Progress:
        """Account for one sequence's part of a step that ran; drops the sequence when it is over."""
        sequence = entry.sequence
        sequence.advance(entry.end)
        self.residency.written(sequence.block_table, sequence.unit_hashes, entry.start, entry.end)
        progress = Progress(sequence.seq_id, sequence.incarnation, sequence.num_computed, tokens=[])
        if sampled is None:
            return progress
        if sampled.token is None:
            sequence.finish_reason = FinishReason.ERROR
            progress.error = f"no finite logits at position {entry.end - 1}"
        else:
            sequence.token_ids.append(sampled.token)
            sequence.finish_reason = sequence.stop_reason(self.runner.card)
            progress.tokens = [sampled.token]
            progress.logprobs = None if sampled.logprobs is None else [sampled.logprobs]
        progress.finish_reason = sequence.finish_reason
        if sequence.finish_reason is not None:
            self._table.drop(sequence.seq_id, sequence.incarnation)
        return progress


@dataclass(slots=True)
class _Launched:
    """A step under way."""

    entries: list[StepEntry]
    sampling: list[LiveSequence]
    watch: StepWatch
    result: Callable[[], StepOutput]


def _resolve(opened: asyncio.Future[Snapshot], snapshot: Snapshot) -> None:
    if not opened.done():
        opened.set_result(snapshot)
