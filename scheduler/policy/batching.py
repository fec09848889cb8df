"""What a worker runs next: decodes first, then prefill chunks up to the step's token budget. Pure.

    one step   | decode | decode | … | chunk of A ……… | chunk of B … |   ≤ step_token_budget tokens

A worker repeats a plan's decodes by itself for up to max_lease_steps, so a plan is sent only when it differs from
"repeat": there is a chunk to run, something to release, pages to grant, or the lease runs out.
"""

from __future__ import annotations

from collections.abc import Callable

from scheduler.policy.placement import min_chunk_tokens
from scheduler.sequence import Sequence
from scheduler.worker_view import InFlightPlan, WorkerView
from wire.config import BatchingConfig
from wire.ids import UNIT_TOKENS, Fence, PlanId
from wire.plan import Child, Decode, PageGrant, PrefillChunk, SequenceStart, StepPlan


class PlanBuilder:
    def __init__(self, config: BatchingConfig, fence: Fence, preempt: Callable[[Sequence], None]) -> None:
        self._config = config
        self._fence = fence
        self._preempt = preempt
        self._min_chunk = min_chunk_tokens(config)
        self._last_plan_id = 0

    def next_plan(self, worker: WorkerView) -> StepPlan | None:
        """The plan to send now, already entered into the worker's plans in flight; None when "repeat" will do."""
        if worker.num_step_plans >= self._config.max_queued_plans:
            return self._send(worker, [], [], max_steps=0) if worker.pending_releases else None
        preempted = self._make_room_for_decodes(worker)
        decodes = [seq for seq in worker.running.values() if not seq.is_prefilling]
        chunks = self._cut_chunks(worker, self._config.step_token_budget - len(decodes))
        if not (chunks or worker.pending_releases or self._repeat_is_short(worker, decodes)):
            return None
        entries = [Decode(seq.seq_id, seq.incarnation, self._top_up(worker, seq)) for seq in decodes]
        max_steps = self._config.max_lease_steps if entries or chunks else 0
        plan = self._send(worker, chunks, entries, max_steps)
        if preempted:
            worker.admission_barrier = plan.plan_id
        return plan

    def _send(self, worker: WorkerView, chunks: list[PrefillChunk], decodes: list[Decode], max_steps: int) -> StepPlan:
        self._last_plan_id += 1
        plan = StepPlan(
            plan_id=PlanId(self._last_plan_id),
            fence=self._fence,
            prefill_chunks=chunks,
            decodes=decodes,
            max_steps=max_steps,
            releases=worker.pending_releases,
        )
        flight = InFlightPlan(plan)
        worker.pending_releases = []
        if max_steps:
            plan.page_copies, flight.pinned = worker.pending_copies, worker.pending_pins
            worker.pending_copies, worker.pending_pins = [], []
        worker.in_flight.append(flight)
        self._publish_dispatched(worker, chunks)
        return plan

    # -- decodes ---------------------------------------------------------------------------------------------------

    def _make_room_for_decodes(self, worker: WorkerView) -> bool:
        """Preempt until every decode that stands at its last granted slot can have one more page."""
        preempted = False
        while True:
            stalled = [s for s in worker.running.values() if not s.is_prefilling and _at_its_limit(s)]
            if len(stalled) <= worker.pool.num_available or len(worker.running) == 1:
                return preempted
            self._preempt(min(worker.running.values(), key=_preempted_first))
            preempted = True

    def _repeat_is_short(self, worker: WorkerView, decodes: list[Sequence]) -> bool:
        """Whether the newest lease ends, or a decode reaches its last slot, within half a lease."""
        if not decodes:
            return False
        half = self._config.max_lease_steps // 2
        if worker.lease_left() <= half:
            return True
        return worker.pool.num_available > 0 and any(
            seq.granted_slots - seq.next_position <= half and seq.granted_slots < seq.max_slots for seq in decodes
        )

    def _top_up(self, worker: WorkerView, seq: Sequence) -> PageGrant | None:
        """Pages for a lease and the steps in flight before it, as far as the pool has them."""
        ahead = self._config.max_lease_steps + self._config.max_queued_plans
        slots = min(seq.next_position + ahead, seq.max_slots)
        wanted = -(-slots // worker.page_size) - len(seq.pages)
        count = min(wanted, worker.pool.num_available)
        if count <= 0:
            return None
        return _grant(seq, count, worker)

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _cut_chunks(self, worker: WorkerView, budget: int) -> list[PrefillChunk]:
        """Chunks of the prefilling sequences, oldest admission first, cut to the budget."""
        chunks: list[PrefillChunk] = []
        for seq in worker.running.values():
            left = seq.prefill_end - seq.num_dispatched
            count = min(left, budget)
            if left <= 0:
                continue
            if count < min(left, self._min_chunk):
                break
            chunks.append(_chunk(seq, count, first=seq.num_dispatched == seq.num_cached))
            seq.num_dispatched += count
            budget -= count
        return chunks

    def _publish_dispatched(self, worker: WorkerView, chunks: list[PrefillChunk]) -> None:
        """Later plans of this worker may reuse what these chunks compute: they run in order."""
        for chunk in chunks:
            seq = worker.running[chunk.seq_id]
            publish_units(worker, seq, seq.num_dispatched)


def _preempted_first(seq: Sequence) -> tuple[int, int, int]:
    """Sorts the lowest priority first, then the latest arrival."""
    return seq.request.spec.priority, -seq.request.arrived_order, -seq.choice


def _at_its_limit(seq: Sequence) -> bool:
    return seq.num_computed >= seq.granted_slots and seq.granted_slots < seq.max_slots


def _grant(seq: Sequence, count: int, worker: WorkerView) -> PageGrant:
    first = len(seq.pages)
    fresh = worker.pool.allocate(count)
    seq.pages += fresh
    return PageGrant(first, fresh, seq.granted_slots)


def _chunk(seq: Sequence, num_tokens: int, *, first: bool) -> PrefillChunk:
    """Positions [num_dispatched, num_dispatched + num_tokens); the first chunk brings the sequence and its pages."""
    spec = seq.request.spec
    chunk = PrefillChunk(seq.seq_id, seq.incarnation, seq.num_dispatched, num_tokens)
    if first:
        chunk.grant = PageGrant(0, list(seq.pages), seq.granted_slots)
        chunk.start = SequenceStart(
            request_id=spec.request_id,
            token_ids=list(seq.tokens),
            num_prompt_tokens=seq.num_prompt,
            sampling=spec.sampling,
            root_hash=spec.root_hash,
            traceparent=spec.traceparent,
        )
    if seq.num_dispatched + num_tokens == seq.prefill_end:
        chunk.children = [Child(seq.seq_id, seq.choice)]
    return chunk


def publish_units(worker: WorkerView, seq: Sequence, num_tokens: int) -> None:
    """Make the sequence's units that end at or before position num_tokens findable in the worker's pool."""
    full = num_tokens // UNIT_TOKENS
    if full <= seq.num_published:
        return
    hashes = seq.unit_hashes()
    for unit in range(seq.num_published, full):
        worker.pool.publish(seq.pages[unit * UNIT_TOKENS // worker.page_size], hashes[unit])
    seq.num_published = full
