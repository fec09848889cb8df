"""One worker as the engine sees it: its pool, its running sequences, its plans in flight. Pure.

A report touches only the sequences it names; what else a plan must know is kept up to date as they change:

    running    pulling: its KV is on the way ─▸ prefilling: chunks left to send ─▸ decoding: stepped by every plan
                                                                              └▸ parked: decoded by another worker
    grants     | … enough for a lease | renewable: fewer slots left than a lease | urgent: fewer than half a lease |
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from kvstore.page_pool import PagePool
from scheduler.policy.step_time import StepTimeModel
from scheduler.sequence import Sequence
from wire.config import BatchingConfig
from wire.ids import PageId, PlanId, PullId, SeqId, UnitHash
from wire.plan import (
    Decode,
    KvPull,
    PageCopy,
    PageGrant,
    PageUnits,
    PrefillChunk,
    Release,
    Role,
    StepPlan,
    StepReport,
    StepTiming,
    WorkerInfo,
)

NEVER = 1 << 62
"""A position that no sequence reaches."""


@dataclass(slots=True)
class InFlightPlan:
    plan: StepPlan
    next_step: int = 0
    """Steps reported so far; a report with a lower number is a repeat."""
    pinned: list[PageId] = field(default_factory=list)
    """Sources of its page copies, held until it is reported."""
    published: list[tuple[PageId, UnitHash]] = field(default_factory=list)
    """Units that its chunks compute."""


class WorkerView:
    def __init__(self, info: WorkerInfo, residents: list[PageUnits], config: BatchingConfig) -> None:
        self.info = info
        self.worker_id = info.worker_id
        self.epoch = info.epoch
        self.role = info.role
        self.has_lower_tiers = False
        self.page_size = info.page_size
        self.pool = PagePool(info.num_pages, info.page_size, info.unit_tokens)
        self.pool.adopt(residents)
        self.step_time = StepTimeModel()
        self._unmeasured_chunks: list[PrefillChunk] = []  # of plans that the one reported next has joined
        self.running: dict[SeqId, Sequence] = {}  # in order of admission, as `prefilling` is
        self.prefilling: dict[SeqId, Sequence] = {}
        self.decoding: dict[SeqId, Sequence] = {}  # where they take turns: least recently stepped first
        self.pulling: dict[SeqId, Sequence] = {}
        self.parked: dict[SeqId, Sequence] = {}
        self.incoming: dict[SeqId, Sequence] = {}
        """Run elsewhere, and hold pages here: they are being handed off to this worker."""
        self.queued_prefill_tokens = 0
        """Of `prefilling` and `pulling`, not yet sent."""
        self.renewable: dict[SeqId, Sequence] = {}
        self.urgent: dict[SeqId, Sequence] = {}
        self.in_flight: list[InFlightPlan] = []  # oldest first
        self.pending_releases: list[Release] = []
        self.pending_copies: list[PageCopy] = []
        self.pending_pins: list[PageId] = []
        self.pending_pulls: list[KvPull] = []
        self.pending_cancels: list[PullId] = []
        self.pending_forgets: list[PageId] = []
        self.num_pulls = 0
        """Under way into this worker, whether somebody waits for them or not."""
        self.admission_barrier: PlanId | None = None
        """Plan that took pages back: nothing is admitted until it is reported."""
        self.slots_ahead = config.max_lease_steps + config.max_queued_plans
        """Steps a decode may take before a plan sent now is looked at again: a lease and the plans in flight before.
        Where reports lag several steps, plans that came too late to join another may be more: then it waits for one."""
        self.half_lease = config.max_lease_steps // 2

    @property
    def capacity_slots(self) -> int:
        return self.pool.num_pages * self.page_size

    @property
    def num_step_plans(self) -> int:
        return sum(1 for f in self.in_flight if f.plan.max_steps)

    @property
    def takes_decodes(self) -> bool:
        return self.role is not Role.PREFILL

    @property
    def pool_range(self) -> tuple[int, int]:
        """Shortest and longest prompt of its pool; 0: no bound."""
        return self.info.min_prompt_tokens, self.info.max_prompt_tokens

    def suits(self, num_prompt: int) -> bool:
        """It belongs to the pool for prompts of this length."""
        shortest, longest = self.pool_range
        return shortest <= num_prompt and (not longest or num_prompt <= longest)

    @property
    def num_held(self) -> int:
        """Sequences that hold pages here."""
        return len(self.running) + len(self.incoming)

    @property
    def has_unsent(self) -> bool:
        """Something must be said to the worker, whether it steps or not."""
        return bool(self.pending_releases or self.pending_pulls or self.pending_cancels or self.pending_forgets)

    # -- sequences -------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> None:
        """Run a sequence that holds its pages; nothing of it was dispatched."""
        seq.decode = Decode(seq.seq_id, seq.incarnation)
        seq.renew_at = NEVER
        self.running[seq.seq_id] = seq
        group = self.pulling if seq.pull is not None else self.prefilling
        group[seq.seq_id] = seq
        self.queued_prefill_tokens += seq.prefill_end - seq.num_dispatched

    def start_prefilling(self, seq: Sequence, num_cached: int) -> None:
        """The pull of a sequence is over: positions [0, num_cached) lie in its pages."""
        del self.pulling[seq.seq_id]
        self.queued_prefill_tokens += seq.num_dispatched - num_cached
        seq.num_cached = seq.num_dispatched = seq.num_computed = num_cached
        self.prefilling[seq.seq_id] = seq

    def remove(self, seq: Sequence) -> None:
        """A running sequence ended or is preempted; its pages are the caller's business."""
        del self.running[seq.seq_id]
        if (self.prefilling.pop(seq.seq_id, None) or self.pulling.pop(seq.seq_id, None)) is not None:
            self.queued_prefill_tokens -= seq.prefill_end - seq.num_dispatched
        elif self.parked.pop(seq.seq_id, None) is None:
            self.decoding.pop(seq.seq_id, None)
            self.renewable.pop(seq.seq_id, None)
            self.urgent.pop(seq.seq_id, None)

    def dispatched(self, seq: Sequence, num_tokens: int) -> None:
        """The next tokens of a prefilling sequence are in a plan."""
        seq.num_dispatched += num_tokens
        self.queued_prefill_tokens -= num_tokens

    def end_prefilling(self, seq: Sequence) -> None:
        """All of a sequence's prefill is in plans: from the next plan on it decodes, here or on another worker."""
        del self.prefilling[seq.seq_id]
        if seq.hands_off:
            self.parked[seq.seq_id] = seq
        else:
            self._start_decoding(seq)

    def unpark(self, seq: Sequence) -> bool:
        """It is to be decoded here after all; False: it is not parked yet, and will never be."""
        seq.hands_off = False
        if self.parked.pop(seq.seq_id, None) is None:
            return False
        self._start_decoding(seq)
        return True

    def _start_decoding(self, seq: Sequence) -> None:
        if seq.prefill_end < seq.max_slots:  # else the token that its last chunk draws is all it may have
            self.decoding[seq.seq_id] = seq
            self.watch_grant(seq)

    def rotate(self, stepped: Iterable[SeqId]) -> None:
        """These decodes are in a plan that has no room for all: next time the others go first."""
        for seq_id in stepped:
            self.decoding[seq_id] = self.decoding.pop(seq_id)

    # -- grants ----------------------------------------------------------------------------------------------------

    def watch_grant(self, seq: Sequence) -> None:
        """Sort a decode in by the slots it has left, and note at which position to do so again."""
        left = seq.granted_slots - seq.next_position
        if seq.granted_slots >= seq.max_slots:
            seq.renew_at = NEVER
        elif left >= self.slots_ahead:
            seq.renew_at = seq.granted_slots - self.slots_ahead + 1
        elif left > self.half_lease:
            self.renewable[seq.seq_id] = seq
            seq.renew_at = seq.granted_slots - self.half_lease
        else:
            self.renewable[seq.seq_id] = self.urgent[seq.seq_id] = seq
            seq.renew_at = NEVER

    def renew_grants(self, stepped: Container[SeqId]) -> dict[SeqId, Decode]:
        """Plan entries with pages for a lease and the steps in flight before it, for those of the decodes that need
        them, as far as the pool has them: the most urgent first."""
        renewed: dict[SeqId, Decode] = {}
        for seq_id, seq in (self.urgent | self.renewable).items():
            if seq_id not in stepped:
                continue
            slots = min(seq.next_position + self.slots_ahead, seq.max_slots)
            count = min(-(-slots // self.page_size) - len(seq.pages), self.pool.num_available)
            if not count:
                break
            renewed[seq_id] = Decode(seq_id, seq.incarnation, self._grant_pages(seq, count))
            del self.renewable[seq_id]
            self.urgent.pop(seq_id, None)
            self.watch_grant(seq)
        return renewed

    def _grant_pages(self, seq: Sequence, count: int) -> PageGrant:
        first = len(seq.pages)
        fresh = self.pool.allocate(count)
        seq.pages += fresh
        seq.granted_slots = len(seq.pages) * self.page_size
        return PageGrant(first, fresh, seq.granted_slots)

    def idle_incoming(self) -> list[Sequence]:
        """Sequences that hold pages here while none of their KV is under way: nothing is computed yet, or no more."""
        return [seq for seq in self.incoming.values() if seq.handoff is not None and seq.handoff.pull is None]

    def num_stalled(self) -> int:
        """Decodes that stand at their last granted slot and need one more page to go on."""
        return sum(1 for seq in self.urgent.values() if seq.num_computed >= seq.granted_slots)

    # -- plans -----------------------------------------------------------------------------------------------------

    def joinable_plans(self) -> list[StepPlan]:
        """The plans that share the step behind the running one, as far as we know: another may join them. Empty where
        none may: there are none, a copy waits that may need what these compute, or a release that would keep one of
        their chunks, which others count on already, from being computed.

        The oldest in flight runs. One that joined it runs with it or, if it came too late for that, comes next; which
        of the two is not known, so both count: a plan that joins another which has begun is just the next one."""
        if self.pending_copies:
            return []
        queued: list[StepPlan] = []
        released = {release.seq_id for release in self.pending_releases}
        for flight in reversed(self.in_flight):
            if flight.next_step or (flight is self.in_flight[0] and not queued):
                break
            if not flight.plan.max_steps:
                return []
            queued.insert(0, flight.plan)
            if not released.isdisjoint(chunk.seq_id for chunk in flight.plan.prefill_chunks):
                return []
            if not flight.plan.joins:
                break
        return queued

    def lease_left(self) -> int:
        """Steps the newest plan in flight may still run; 0 when none is in flight."""
        for flight in reversed(self.in_flight):
            if flight.plan.max_steps:
                return flight.plan.max_steps - flight.next_step
        return 0

    def observe_step(self, plan: StepPlan, timing: StepTiming | None) -> None:
        """Learn from a plan's first step; without a timing, it shared the step of the plan reported next."""
        self._unmeasured_chunks += plan.prefill_chunks
        if timing is not None:
            self.step_time.observe(self._unmeasured_chunks, timing)
            self._unmeasured_chunks = []

    def accept_report(self, report: StepReport) -> InFlightPlan | None:
        """Advance the plans in flight; the report's own. None for one that is late, repeated or not ours: ignore it."""
        position = next((i for i, f in enumerate(self.in_flight) if f.plan.plan_id == report.plan_id), None)
        if position is None or report.step < self.in_flight[position].next_step:
            return None
        # Plans run in order: a report of a later plan means every earlier one is over.
        over = position + 1 if report.plan_done else position
        reported = self.in_flight[position]
        reported.next_step = report.step + 1
        for flight in self.in_flight[: position + 1]:
            self.pool.release(flight.pinned)
            for page, unit_hash in flight.published:
                self.pool.mark_computed(page, unit_hash)
            flight.pinned, flight.published = [], []
        del self.in_flight[:over]
        if self.admission_barrier is not None and report.plan_id >= self.admission_barrier:
            self.admission_barrier = None
        return reported
