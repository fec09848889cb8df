"""What a worker runs next: decodes first, then prefill chunks up to the step's token budget. Pure.

    one step   | decode | decode | … | chunk of A ……… | chunk of B … |   ≤ step_token_budget tokens, ≤ itl_target_ms
    without decodes | chunk of A …………………… | …           ≤ step_token_budget tokens, ≤ 2 itl_target_ms

More decodes than the budget holds take turns, step by step, beside one minimum chunk where there is prefill to do.
A worker repeats a plan's decodes by itself for up to max_lease_steps, so a plan is sent only when it differs from
"repeat": there is a chunk to run, something to release, pages to grant, or the lease runs out. Chunks run in a plan's
first step only, so that is the step whose time the target bounds.

A prompt that comes while plans are queued behind the running step, as far as is known here, joins their step, as far as
it has room, instead of waiting for a report (docs/adr/0011).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from math import isfinite

from scheduler.policy.placement import min_chunk_tokens
from scheduler.policy.step_time import StepWork
from scheduler.sequence import Sequence
from scheduler.worker_view import InFlightPlan, WorkerView
from wire.config import BatchingConfig
from wire.ids import UNIT_TOKENS, Fence, PageId, PlanId, SeqId, UnitHash
from wire.plan import Child, Decode, PageGrant, PrefillChunk, SequenceStart, StepPlan

PREFILL_ONLY_TARGETS = 2.0
"""ITL targets that a step may take in which nothing decodes: it delays no token, only a cancel or a newcomer, and
larger chunks read the weights less often."""
MAX_JOINED = 8
"""Plans that join one: more wait for its report."""


class PlanBuilder:
    """`preempt(seq)` takes a running sequence off its worker; `give_way(seq)` takes back the pages that are held for
    one which runs elsewhere."""

    def __init__(
        self,
        config: BatchingConfig,
        fence: Fence,
        preempt: Callable[[Sequence], None],
        give_way: Callable[[Sequence], None],
    ) -> None:
        self._config = config
        self._target_us = 1000.0 * config.itl_target_ms if isfinite(config.itl_target_ms) else None
        self._fence = fence
        self._preempt = preempt
        self._give_way = give_way
        self._min_chunk = min_chunk_tokens(config)
        self._last_plan_id = 0

    def next_plan(self, worker: WorkerView) -> StepPlan | None:
        """The plan to send now, already entered into the worker's plans in flight; None when "repeat" will do."""
        if worker.num_step_plans >= self._config.max_queued_plans:
            return self._joining_plan(worker) or (self._send(worker, [], []) if worker.has_unsent else None)
        took_pages_back = self._make_room_for_decodes(worker)
        stepped = self._next_decodes(worker)
        takes_turns = len(stepped) < len(worker.decoding)
        is_short = bool(stepped) and (takes_turns or self._repeat_is_short(worker))
        chunks, joining = self._cut_chunks(worker, len(stepped), []) if worker.prefilling else ([], [])
        if not (chunks or worker.has_unsent or is_short):
            return None
        decodes = self._decode_entries(worker, stepped)
        if takes_turns:
            worker.rotate(stepped)
        for seq in joining:
            worker.end_prefilling(seq)
        plan = self._send(worker, chunks, decodes, once=takes_turns or _end_here(joining))
        if took_pages_back:
            worker.admission_barrier = plan.plan_id
        return plan

    def _joining_plan(self, worker: WorkerView) -> StepPlan | None:
        """Chunks for the step behind the running one, which they share with what is queued for it, if it has room."""
        queued = worker.joinable_plans()
        if not queued or len(queued) > MAX_JOINED or not worker.prefilling:
            return None
        if len(worker.decoding) > self._config.step_token_budget - self._min_chunk:
            return None  # they take turns
        chunks, joining = self._cut_chunks(worker, len(worker.decoding), queued)
        if not chunks:
            return None
        decodes = self._decode_entries(worker, worker.decoding)
        for seq in joining:
            worker.end_prefilling(seq)
        return self._send(worker, chunks, decodes, once=_end_here(joining), joins=True)

    def _send(
        self,
        worker: WorkerView,
        chunks: list[PrefillChunk],
        decodes: list[Decode],
        *,
        once: bool = False,
        joins: bool = False,
    ) -> StepPlan:
        self._last_plan_id += 1
        lease = 1 if once else self._config.max_lease_steps
        plan = StepPlan(
            plan_id=PlanId(self._last_plan_id),
            fence=self._fence,
            prefill_chunks=chunks,
            decodes=decodes,
            max_steps=lease if decodes or chunks else 0,
            kv_pulls=worker.pending_pulls,
            releases=worker.pending_releases,
            cancelled_pulls=worker.pending_cancels,
            forgotten_pages=worker.pending_forgets,
            joins=joins,
        )
        flight = InFlightPlan(plan)
        # A copy goes with the next plan, whatever that is: its source is held until then, and its target may have been
        # given up since and be a pull's.
        plan.page_copies, flight.pinned = worker.pending_copies, worker.pending_pins
        worker.pending_copies, worker.pending_pins = [], []
        worker.pending_pulls, worker.pending_releases, worker.pending_cancels = [], [], []
        worker.pending_forgets = []
        worker.in_flight.append(flight)
        for chunk in chunks:  # later plans of this worker may reuse what these compute: they run in order
            seq = worker.running[chunk.seq_id]
            flight.published += publish_units(worker, seq, seq.num_dispatched)
        return plan

    # -- decodes ---------------------------------------------------------------------------------------------------

    def _make_room_for_decodes(self, worker: WorkerView) -> bool:
        """Take pages back until every decode that stands at its last granted slot can have one more: first those held
        for sequences whose KV is not on its way, which wait for their prefill anyway and find most of what has come
        still cached, then those of running ones. True when some were."""
        took_any = False
        while worker.num_stalled() > worker.pool.num_available:
            if idle := worker.idle_incoming():
                self._give_way(min(idle, key=_preempted_first))
            elif len(worker.running) > 1:
                self._preempt(min(worker.running.values(), key=_preempted_first))
            else:
                break  # what is on its way arrives, or fails: then one of two running ones goes, or the pages are back
            took_any = True
        return took_any

    def _repeat_is_short(self, worker: WorkerView) -> bool:
        """Whether the newest lease ends, or a decode reaches its last slot, within half a lease."""
        if not worker.pool.num_available and worker.num_stalled() == len(worker.decoding):
            return False  # none could take a step: whoever gives pages back has the worker planned again
        if worker.lease_left() <= worker.half_lease:
            return True
        return bool(worker.urgent) and worker.pool.num_available > 0

    def _next_decodes(self, worker: WorkerView) -> dict[SeqId, Sequence]:
        """All, or as many as the budget holds beside one minimum chunk: those least recently stepped."""
        room = self._config.step_token_budget - (self._min_chunk if worker.prefilling else 0)
        return worker.decoding if len(worker.decoding) <= room else dict(islice(worker.decoding.items(), room))

    def _decode_entries(self, worker: WorkerView, stepped: dict[SeqId, Sequence]) -> list[Decode]:
        """Plan entries of decodes, with pages for a lease where they need them."""
        renewed = worker.renew_grants(stepped)
        if not renewed:
            return [seq.decode for seq in stepped.values()]
        return [renewed.get(seq_id) or seq.decode for seq_id, seq in stepped.items()]

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _cut_chunks(
        self, worker: WorkerView, num_decodes: int, queued: list[StepPlan]
    ) -> tuple[list[PrefillChunk], list[Sequence]]:
        """Chunks of the prefilling sequences, oldest admission first, cut to what the budget and the chunks of `queued`
        plans leave; and whose last one it is."""
        chunks: list[PrefillChunk] = []
        joining: list[Sequence] = []
        before = [chunk for plan in queued for chunk in plan.prefill_chunks]
        budget = self._config.step_token_budget - num_decodes - sum(chunk.num_tokens for chunk in before)
        work = StepWork(num_decodes, decode_context=worker.step_time.decode_context)
        for chunk in before:
            work.add_chunk(chunk.start_pos, chunk.num_tokens)
        has_chunk = {chunk.seq_id for chunk in before}
        target_us = self._target_us
        if target_us is not None and not num_decodes:
            target_us *= PREFILL_ONLY_TARGETS
        for seq in worker.prefilling.values():
            left = seq.prefill_end - seq.num_dispatched
            count = min(left, budget)
            if target_us is not None:
                fits = worker.step_time.chunk_that_fits(work, seq.num_dispatched, target_us)
                # The first chunk is never smaller than the minimum: prefill does not wait for an easier target.
                count = min(count, fits if chunks or before else max(fits, self._min_chunk))
            if count < min(left, self._min_chunk) or seq.seq_id in has_chunk:
                break
            chunks.append(_chunk(seq, count, first=seq.num_dispatched == seq.num_cached))
            work.add_chunk(seq.num_dispatched, count)
            worker.dispatched(seq, count)
            budget -= count
            if count == left:
                joining.append(seq)
        return chunks, joining


def _end_here(joining: list[Sequence]) -> bool:
    """A chunk that ends its prompt decodes in the plan's further steps: not where another worker is to decode it."""
    return any(seq.hands_off for seq in joining)


def _preempted_first(seq: Sequence) -> tuple[int, int, int]:
    """Sorts the lowest priority first, then the latest arrival."""
    return seq.request.spec.priority, -seq.request.arrived_order, -seq.choice


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


def publish_units(worker: WorkerView, seq: Sequence, num_tokens: int) -> list[tuple[PageId, UnitHash]]:
    """Make the sequence's units that end at or before position num_tokens findable in the worker's pool; returns those
    that were not yet, with their pages."""
    full = num_tokens // UNIT_TOKENS
    if full <= seq.num_published:
        return []
    hashes = seq.unit_hashes()
    published = [
        (seq.pages[unit * UNIT_TOKENS // worker.page_size], hashes[unit]) for unit in range(seq.num_published, full)
    ]
    for page, unit_hash in published:
        worker.pool.publish(page, unit_hash)
    seq.num_published = full
    return published
