"""One worker as the engine sees it: its pool, its running sequences, its plans in flight. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.page_pool import PagePool
from scheduler.sequence import Sequence
from wire.ids import PageId, PlanId, SeqId
from wire.plan import PageCopy, PageUnits, Release, StepPlan, StepReport, WorkerInfo


@dataclass(slots=True)
class InFlightPlan:
    plan: StepPlan
    next_step: int = 0
    """Steps reported so far; a report with a lower number is a repeat."""
    pinned: list[PageId] = field(default_factory=list)
    """Sources of its page copies, held until it is reported."""


class WorkerView:
    def __init__(self, info: WorkerInfo, residents: list[PageUnits]) -> None:
        self.info = info
        self.worker_id = info.worker_id
        self.epoch = info.epoch
        self.page_size = info.page_size
        self.pool = PagePool(info.num_pages, info.page_size, info.unit_tokens)
        self.pool.adopt(residents)
        self.running: dict[SeqId, Sequence] = {}  # in order of admission
        self.in_flight: list[InFlightPlan] = []  # oldest first
        self.pending_releases: list[Release] = []
        self.pending_copies: list[PageCopy] = []
        self.pending_pins: list[PageId] = []
        self.admission_barrier: PlanId | None = None
        """Plan that preempted: nothing is admitted until it is reported."""

    @property
    def capacity_slots(self) -> int:
        return self.pool.num_pages * self.page_size

    @property
    def num_step_plans(self) -> int:
        return sum(1 for f in self.in_flight if f.plan.max_steps)

    @property
    def queued_prefill_tokens(self) -> int:
        return sum(s.prefill_end - s.num_dispatched for s in self.running.values() if s.is_prefilling)

    @property
    def num_decodes(self) -> int:
        return sum(1 for s in self.running.values() if not s.is_prefilling)

    def lease_left(self) -> int:
        """Steps the newest plan in flight may still run; 0 when none is in flight."""
        for flight in reversed(self.in_flight):
            if flight.plan.max_steps:
                return flight.plan.max_steps - flight.next_step
        return 0

    def accept_report(self, report: StepReport) -> bool:
        """Advance the plans in flight. False for a report that is late, repeated or not ours: ignore it whole."""
        position = next((i for i, f in enumerate(self.in_flight) if f.plan.plan_id == report.plan_id), None)
        if position is None or report.step < self.in_flight[position].next_step:
            return False
        # Plans run in order: a report of a later plan means every earlier one is over.
        over = position + 1 if report.plan_done else position
        self.in_flight[position].next_step = report.step + 1
        for flight in self.in_flight[: position + 1]:
            self.pool.release(flight.pinned)
            flight.pinned = []
        del self.in_flight[:over]
        if self.admission_barrier is not None and report.plan_id >= self.admission_barrier:
            self.admission_barrier = None
        return True
