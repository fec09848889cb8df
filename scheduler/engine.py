"""The scheduler as a pure function of events: `handle(event, now) -> commands` (design §3).

The life of a request:

    RequestArrived ─▸ queued ─▸ placed ─▸ KV pulled ─▸ prefill chunks ─▸ handed off ─▸ decodes ─▸ FinishRequest
                        ▲                 (maybe)                        (maybe)         │
                        └────────── preempted, a transfer failed, or the worker is gone ─┘

The live service, the property tests and the simulator run this code unchanged. It reads no clock and does no I/O;
whatever order events come in, every request ends in exactly one FinishRequest.
"""

from __future__ import annotations

from itertools import count
from typing import assert_never

from kvstore.prefix_twin import PrefixTwin
from scheduler.blame import Blame
from scheduler.commands import Command, DispatchPlan, FinishRequest, PublishReply
from scheduler.events import (
    CancelRequested,
    ChoiceProgress,
    Event,
    FenceLost,
    PullReported,
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
from scheduler.placing import Placing
from scheduler.policy.batching import PlanBuilder, publish_units
from scheduler.policy.fair_queue import OUTPUT_WEIGHT, charge
from scheduler.policy.placement import too_large
from scheduler.policy.routing import decoders
from scheduler.request_book import RequestBook
from scheduler.sequence import LiveRequest, SeqState, Sequence
from scheduler.stats import EngineStats, PrefillRate, WorkerStats
from scheduler.worker_view import WorkerView
from wire.config import BatchingConfig
from wire.entries import ChoiceReply, TokensReply
from wire.errors import MeshError, StepFailed, WorkerLost
from wire.ids import UNIT_TOKENS, Fence, SeqId
from wire.plan import ModelCard, Progress, StepReport
from wire.sampling import FinishReason


class Engine:
    """One cell's policy and books. `fence` goes into every plan; `routing_seed` decides ties between workers."""

    def __init__(self, config: BatchingConfig, *, no_worker_grace_s: float, routing_seed: int, fence: Fence) -> None:
        self._config = config
        self._no_worker_grace_s = no_worker_grace_s
        self._book = RequestBook()
        self._seq_ids = count(1)
        self._model: ModelCard | None = None
        self._rate = PrefillRate()
        self._placing = Placing(config, self._rate, routing_seed=routing_seed)
        self._builder = PlanBuilder(config, fence, self._preempt, self._placing.give_way)
        self._workers = self._placing.workers
        self._queue = self._placing.queue
        self._num_preemptions = 0
        self._num_displaced = 0
        self._no_worker_since_s: float | None = None
        self._blame = Blame(self._book.live)
        self._fence_lost = False
        self._now = 0.0
        self._commands: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take in one event at time `now` (seconds, never going back); returns what is to be done, in order."""
        if self._fence_lost:
            return []
        self._now = now
        if self._no_worker_since_s is None and not self._workers:
            self._no_worker_since_s = now
        match event:
            case RequestArrived(request, progress):
                self._arrive(request, progress)
            case CancelRequested():
                self._cancel(event)
            case WorkerUp():
                self._worker_up(event)
            case WorkerDown(worker_id, epoch, reason):
                worker = self._workers.get(worker_id)
                if worker is not None and worker.epoch == epoch:
                    self._lose_worker(worker, WorkerLost(f"worker {worker_id} was lost: {reason}"))
            case StepReported(worker_id, epoch, report):
                worker = self._workers.get(worker_id)
                if worker is not None and worker.epoch == epoch:
                    self._take_report(worker, report)
            case PullReported(worker_id, epoch, report):
                worker = self._workers.get(worker_id)
                if worker is not None and worker.epoch == epoch:
                    self._placing.pull_reported(worker, report, now)
            case TierChanged(worker_id, epoch, units):
                worker = self._workers.get(worker_id)
                if worker is not None and worker.epoch == epoch:
                    worker.has_lower_tiers = True
                    self._commands.append(self._placing.prefixes.tier_changed(worker, units, now))
            case RoleChanged(worker_id, role):
                worker = self._workers.get(worker_id)
                if worker is not None:
                    worker.role = role
            case Tick():
                self._give_up_without_workers()
                self._blame.forget_ended()
                self._placing.expire(now)
            case ResidencyAudited(worker_id, epoch):
                worker = self._workers.get(worker_id)
                if worker is not None and worker.epoch == epoch:
                    self._commands += self._placing.audited(worker, event, now)
            case FenceLost():
                self._fence_lost = True
                return []
            case _:
                assert_never(event)
        self._schedule()
        self._commands += self._placing.index_changes()
        commands, self._commands = self._commands, []
        return commands

    @property
    def twin(self) -> PrefixTwin:
        """Which worker holds which computed unit, by tier."""
        return self._placing.prefixes.twin

    def stats(self) -> EngineStats:
        workers = [
            WorkerStats(w.worker_id, len(w.running), w.pool.num_pages, w.pool.counts(), w.role, w.num_pulls)
            for w in self._workers.values()
        ]
        longest = max((w.capacity_slots for w in decoders(self._workers.values())), default=0)
        return EngineStats(
            waiting=len(self._queue),
            running=sum(w.running for w in workers),
            preemptions=self._num_preemptions,
            displaced=self._num_displaced,
            workers=workers,
            model=self._model,
            max_request_tokens=longest + 1 if longest else 0,
            predicted_drain_s=self._rate.drain_s(self._queue.waiting_tokens, len(workers)),
        )

    # -- requests come and go --------------------------------------------------------------------------------------

    def _arrive(self, spec: Request, progress: tuple[ChoiceProgress, ...]) -> None:
        if spec.request_id in self._book.live:
            return
        ended = self._book.ended(spec.request_id)
        if ended is not None:
            self._commands.append(ended)
            return
        request = LiveRequest(spec, self._book.next_order())
        request.timeline.arrived_s = self._now
        request.stats.prompt_tokens = len(spec.prompt)
        self._book.live[spec.request_id] = request
        known = {p.choice: p for p in progress}
        for choice in range(spec.num_choices):
            before = known.get(choice)
            seq = Sequence(
                seq_id=SeqId(next(self._seq_ids)),
                request=request,
                choice=choice,
                tokens=spec.prompt + (before.output if before else []),
                num_prompt=len(spec.prompt),
                queued_s=self._now,
            )
            if before is not None and before.finish_reason is not None:
                seq.state, seq.finish_reason = SeqState.FINISHED, before.finish_reason
            request.sequences.append(seq)
        request.held_back = [seq for seq in request.sequences if seq.state is SeqState.WAITING]
        if not request.held_back:
            self._finish(request)
        elif self._book.was_cancelled(spec.request_id):
            self._end_request(request, FinishReason.CANCELLED)
        else:
            self._placing.enqueue(request.held_back.pop(0))

    def _cancel(self, event: CancelRequested) -> None:
        request = self._book.live.get(event.request_id)
        if request is None:
            if event.choice is None:
                self._book.cancel_early(event.request_id)
            return
        reason = FinishReason.STOP if event.reason == "stop" else FinishReason.CANCELLED
        for seq in request.sequences:
            if event.choice is None or seq.choice == event.choice:
                self._end_choice(seq, reason)

    def _end_request(self, request: LiveRequest, reason: FinishReason, error: MeshError | None = None) -> None:
        """End every choice that still runs, and so the request."""
        for seq in request.sequences:
            self._end_choice(seq, reason, error)

    def _end_choice(
        self, seq: Sequence, reason: FinishReason, error: MeshError | None = None, *, by_worker: bool = False
    ) -> None:
        """The one way a choice ends. The last one ends its request, with `error` if that is why."""
        request = seq.request
        if seq.state is SeqState.FINISHED:
            return
        if seq.state is SeqState.RUNNING:
            self._queue.leave(seq)
            self._placing.take_off(seq, worker_knows=by_worker)
            seq.state = SeqState.FINISHED
        elif seq in request.held_back:
            request.held_back.remove(seq)
            seq.state = SeqState.FINISHED
        else:
            seq.state = SeqState.FINISHED
            self._queue.discard(seq)
        seq.finish_reason = reason
        item = ChoiceReply(request.spec.request_id, seq.choice, seq.num_output, reason.value)
        self._commands.append(PublishReply(request.spec.gateway_id, item))
        if all(s.state is SeqState.FINISHED for s in request.sequences):
            self._finish(request, error)
        elif error is None:
            self._release_siblings(request)

    def _finish(self, request: LiveRequest, error: MeshError | None = None) -> None:
        terminal = request.terminal(self._now, error)
        finish = FinishRequest(request.spec.gateway_id, request.spec.request_id, terminal, request.timeline)
        request.sequences = []  # they name their request too: without the circle both are freed at once
        self._book.end(finish)
        self._commands.append(finish)

    def _release_siblings(self, request: LiveRequest) -> None:
        """The first choice's prompt is on its way: the others can share its pages now."""
        for sibling in request.held_back:
            self._placing.enqueue(sibling)
        request.held_back = []

    # -- workers come and go ---------------------------------------------------------------------------------------

    def _worker_up(self, event: WorkerUp) -> None:
        known = self._workers.get(event.info.worker_id)
        if known is not None:
            self._lose_worker(known, WorkerLost(f"worker {known.worker_id} started again"))
        self._model = event.info.model
        worker = WorkerView(event.info, event.residents, self._config)
        self._commands += self._placing.worker_up(worker, event.tiers, self._now)
        self._blame.worker_back(worker)
        self._no_worker_since_s = None

    def _lose_worker(self, worker: WorkerView, error: MeshError) -> None:
        """Its sequences go back to the queue with what they published; the one recovery path (design §4)."""
        self._placing.worker_down(worker)
        if not self._workers:
            self._no_worker_since_s = self._now
        for seq in list(worker.running.values()):
            self._num_displaced += 1
            seq.request.timeline.worker_lost_s.append(self._now)
            self._placing.requeue(seq, self._now)
        present = list({id(seq.request): seq.request for seq in worker.running.values()}.values())
        for request in self._blame.worker_lost(worker, present):
            self._end_request(request, FinishReason.ERROR, error)

    def _give_up_without_workers(self) -> None:
        since = self._no_worker_since_s
        if self._workers or since is None:
            return
        for request in list(self._book.live.values()):
            if self._now - max(since, request.timeline.arrived_s) >= self._no_worker_grace_s:
                error = WorkerLost(f"no worker for {self._no_worker_grace_s:g} s", retry_after_s=1.0)
                self._end_request(request, FinishReason.ERROR, error)

    def _preempt(self, seq: Sequence) -> None:
        """Called by the plan builder: the sequence gives up its pages, and resumes later mostly from cached ones."""
        assert seq.worker is not None
        self._num_preemptions += 1
        seq.request.stats.preemptions += 1
        seq.request.timeline.preempted_s.append(self._now)
        self._placing.take_off(seq)
        self._placing.requeue(seq, self._now)

    # -- reports ---------------------------------------------------------------------------------------------------

    def _take_report(self, worker: WorkerView, report: StepReport) -> None:
        if report.failure is not None:
            self._placing.prefixes.worker_failed(worker)
            self._lose_worker(worker, StepFailed(f"a step failed on {worker.worker_id}: {report.failure}"))
            return
        flight = worker.accept_report(report)
        if flight is None:
            return
        if report.timing is not None:
            self._rate.add(report.timing)
        if report.step == 0:
            worker.observe_step(flight.plan, report.timing)
        running = worker.running
        for progress in report.progress:
            seq = running.get(progress.seq_id)
            if seq is not None and seq.incarnation == progress.incarnation:
                self._advance(worker, seq, progress)
        self._placing.to_plan[worker.worker_id] = None

    def _advance(self, worker: WorkerView, seq: Sequence, progress: Progress) -> None:
        if progress.num_computed > seq.num_computed:
            seq.num_computed = progress.num_computed
        if progress.tokens and not self._append_tokens(seq, progress):
            # The worker is ahead of what we were told: start over from the tokens we know.
            self._placing.take_off(seq)
            self._placing.requeue(seq, self._now)
            return
        if seq.num_computed >= (seq.num_published + 1) * UNIT_TOKENS:
            for page, unit_hash in publish_units(worker, seq, seq.num_computed):
                worker.pool.mark_computed(page, unit_hash)
        if seq.num_computed >= seq.renew_at:
            worker.watch_grant(seq)
        if progress.finish_reason is FinishReason.ERROR:
            for page in seq.pages[seq.num_shared_pages :]:
                worker.pool.withdraw(page)
            error = StepFailed(progress.error or "the worker could not go on with this sequence")
            self._end_request(seq.request, FinishReason.ERROR, error)
        elif progress.finish_reason is not None:
            self._end_choice(seq, progress.finish_reason, by_worker=True)

    def _append_tokens(self, seq: Sequence, progress: Progress) -> bool:
        """Take the tokens we do not have yet; False when there is a gap before them."""
        tokens, logprobs = progress.tokens, progress.logprobs
        known = len(seq.tokens)
        repeated = known - (progress.num_computed + 1 - len(tokens))
        if repeated < 0:
            return False
        if repeated:
            tokens = tokens[repeated:]
            logprobs = logprobs[repeated:] if logprobs is not None else None
        if not tokens:
            return True
        seq.tokens += tokens
        charge(seq, OUTPUT_WEIGHT * len(tokens))
        if self._blame.has_faults:
            seq.request.faults = 0
        if not seq.has_streamed:
            seq.has_streamed = True
            seq.request.note_first_token(self._now)
        item = TokensReply(seq.request_id, seq.choice, known - seq.num_prompt, tokens, logprobs)
        self._commands.append(PublishReply(seq.gateway_id, item))
        return True

    # -- placing and planning --------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Place what waits, then plan every worker that something changed on, until nothing moves."""
        to_plan = self._placing.to_plan
        for seq in self._placing.hand_off(self._now):
            self._release_siblings(seq.request)
        self._place_waiting()
        while to_plan:
            worker = self._workers[next(iter(to_plan))]
            del to_plan[worker.worker_id]
            while (plan := self._builder.next_plan(worker)) is not None:
                self._commands.append(DispatchPlan(worker.worker_id, worker.epoch, plan))
                for chunk in plan.prefill_chunks:
                    seq = worker.running[chunk.seq_id]
                    if chunk.children and not seq.hands_off:  # else where it is decoded: they follow it there
                        self._release_siblings(seq.request)
                self._place_waiting()

    def _place_waiting(self) -> None:
        """Admit from the head of each queue; a head without room blocks those behind it, and the workers it waits for
        are closed to other queues, so that nobody starves."""
        heads = self._queue.heads()
        if not heads:
            return
        closed = set(self._placing.awaited)
        for queue in heads:
            while self._workers and (seq := queue.peek()) is not None:
                if self._already_over(seq) or self._placing.admit(seq, closed, self._now):
                    continue
                if not self._placing.fits_nowhere(seq):
                    closed.update(self._placing.suited(seq))
                    break
                error = too_large(seq, decoders(self._workers.values()))
                self._end_request(seq.request, FinishReason.ERROR, error)

    def _already_over(self, seq: Sequence) -> bool:
        """A sequence taken over from an earlier scheduler may have had its last token already."""
        sampling = seq.request.spec.sampling
        if not seq.num_output:
            return False
        assert self._model is not None
        last = seq.tokens[-1]
        is_eos = last in self._model.eos_token_ids and not sampling.ignore_eos
        if (is_eos or last in sampling.stop_token_ids) and seq.num_output > sampling.min_tokens:
            self._end_choice(seq, FinishReason.STOP)
        elif seq.num_output >= sampling.max_tokens:
            self._end_choice(seq, FinishReason.LENGTH)
        return seq.state is SeqState.FINISHED
