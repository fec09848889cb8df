"""Which sequence runs on which worker: from the queue to a worker, from one to another, and back. Pure.

queue ──admit──▸ on a worker ──handed off──▸ on the worker that decodes it
  ▲                  │ take_off, requeue: preempted, a transfer failed, the worker is gone
  └──────────────────┘
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from scheduler.commands import Admission, UpdateIndex
from scheduler.events import ResidencyAudited
from scheduler.policy.batching import publish_units
from scheduler.policy.fair_queue import CACHED_WEIGHT, INPUT_WEIGHT, charge
from scheduler.policy.handoff import Handoffs
from scheduler.policy.placement import Placement, fits_ever, occupy
from scheduler.policy.pool_queues import PoolQueues
from scheduler.policy.routing import Router, decoders, suited_workers
from scheduler.policy.transfers import Pull, Transfers, release_pages
from scheduler.prefix_changes import PrefixChanges
from scheduler.sequence import Sequence
from scheduler.stats import PrefillRate
from scheduler.worker_view import WorkerView
from wire.config import BatchingConfig
from wire.ids import UNIT_TOKENS, WorkerId
from wire.plan import PullReport, Release, Role, TierUnits


class Placing:
    """The workers, the queue, and the KV on its way between them. `to_plan` names the workers whose next plan may
    differ from "repeat"."""

    def __init__(self, config: BatchingConfig, rate: PrefillRate, *, routing_seed: int) -> None:
        self.workers: dict[WorkerId, WorkerView] = {}
        self.queue = PoolQueues()
        self.to_plan: dict[WorkerId, None] = {}
        self.prefixes = PrefixChanges()
        self._transfers = Transfers(config.pull_lease_ms * 1e-3, self.prefixes.shared, self.to_plan)
        self._router = Router(
            config, self.prefixes.twin, self.prefixes.shared, self._transfers, rate, routing_seed=routing_seed
        )
        self._handoffs = Handoffs(self._router, self._transfers, self.take_off, self.to_plan)

    # -- workers ---------------------------------------------------------------------------------------------------

    def worker_up(self, worker: WorkerView, tiers: list[TierUnits], now: float) -> list[UpdateIndex]:
        self.workers[worker.worker_id] = worker
        worker.has_lower_tiers = bool(tiers)
        self.queue.sort_in(self.workers.values())
        return self.prefixes.worker_up(worker, tiers, now)

    def worker_down(self, worker: WorkerView) -> None:
        """It and its KV are gone; what ran on it is the caller's to requeue."""
        del self.workers[worker.worker_id]
        self.to_plan.pop(worker.worker_id, None)
        self.prefixes.worker_down(worker)
        self._router.forget(worker)
        self._transfers.lose_worker(worker)
        self._handoffs.lose_target(worker)
        for seq in worker.running.values():
            self._handoffs.abandon(seq)

    def audited(self, worker: WorkerView, audit: ResidencyAudited, now: float) -> list[UpdateIndex]:
        """What the worker holds was held against the twin."""
        self.to_plan[worker.worker_id] = None
        return self.prefixes.audited(worker, audit, now)

    def index_changes(self) -> Iterable[UpdateIndex]:
        """What came into the workers' pages, and what went, since the last call."""
        return [self.prefixes.pages_changed(worker) for worker in self.workers.values() if worker.pool.has_changes]

    # -- from the queue to a worker --------------------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        """It waits for the workers of its prompt's length."""
        self.queue.push(seq, self.workers.values())

    @property
    def awaited(self) -> set[WorkerId]:
        """Workers whose next room is for a sequence that was prefilled elsewhere."""
        return self._handoffs.awaited

    def suited(self, seq: Sequence) -> Iterable[WorkerId]:
        """The workers that a waiting sequence waits for."""
        return [worker.worker_id for worker in suited_workers(seq, self.workers.values())]

    def admit(self, seq: Sequence, closed: Container[WorkerId], now: float) -> bool:
        """Begin a waiting sequence on the best worker that is not closed; False when there is no room now."""
        placements = self._router.placements(seq, self.workers.values(), closed, now)
        if not placements:
            return False
        chosen = self._router.choose(seq, placements)
        self.queue.pop(seq)
        occupy(seq, chosen, self._transfers, now)
        self.to_plan[chosen.worker.worker_id] = None
        if chosen.hands_off:
            self._handoffs.add(seq)
        seq.request.note_admission(_admission(seq, chosen, placements, now))
        if not seq.requeued:
            num_cached = chosen.room.num_cached
            charge(seq, INPUT_WEIGHT * (len(seq.tokens) - num_cached) + CACHED_WEIGHT * num_cached)
        return True

    def fits_nowhere(self, seq: Sequence) -> bool:
        """No worker could ever take it to its last token."""
        return not any(fits_ever(seq, worker) for worker in decoders(self.workers.values()))

    def hand_off(self, now: float) -> list[Sequence]:
        """Move on what is prefilled where it will not be decoded; returns what is prefilled and stays after all."""
        arrived, stayed = self._handoffs.advance(self.workers.values(), now)
        for seq in arrived:
            assert seq.worker is not None
            self.to_plan[seq.worker.worker_id] = None
            seq.request.note_admission(_handover(seq, seq.worker.worker_id, now))
        return stayed

    def give_way(self, seq: Sequence) -> None:
        """The pages held for a sequence that runs elsewhere are taken back; it gets others later."""
        self._handoffs.abandon(seq)

    # -- and back --------------------------------------------------------------------------------------------------

    def take_off(self, seq: Sequence, *, worker_knows: bool = False) -> None:
        """A running sequence gives up its pages, and whatever is on its way to it."""
        worker = seq.worker
        assert worker is not None
        worker.remove(seq)
        if not worker_knows:
            worker.pending_releases.append(Release(seq.seq_id, seq.incarnation))
        self._handoffs.abandon(seq)
        if seq.pull is not None:
            self._transfers.abandon(seq.pull)
        release_pages(worker, seq.pages, seq.pull)
        seq.pull = None
        self.to_plan[worker.worker_id] = None

    def requeue(self, seq: Sequence, now: float) -> None:
        """Back to the queue with the tokens it has; its pages are dealt with."""
        if seq.parked_s is not None:
            seq.request.note_handoff(seq.parked_s, now)
        seq.leave_worker()
        seq.requeued = True
        seq.queued_s = now
        seq.request.note_stall(now)
        self.queue.put_back(seq, self.workers.values())

    # -- KV on its way ---------------------------------------------------------------------------------------------

    def pull_reported(self, worker: WorkerView, report: PullReport, now: float) -> None:
        """A transfer goes on or is over: who waited for it begins, or goes on, with what it brought."""
        pull = self._transfers.reported(worker, report, now)
        if pull is None or pull.seq is None:
            return
        seq = pull.seq
        num_units = min(report.num_units, pull.num_units)
        is_whole = num_units == pull.num_units
        seq.request.note_transfer(pull.transfer(seq, report, num_units, now), now)
        handoff = seq.handoff
        if handoff is not None and handoff.pull is pull:
            self._handoffs.pulled(seq, handoff, num_units if is_whole else 0)
            if not is_whole:
                self._fall_back(pull, now)
            return
        seq.pull = None
        num_shared = seq.num_shared_pages * worker.page_size
        worker.start_prefilling(seq, num_shared + num_units * UNIT_TOKENS)
        seq.request.note_cached(seq.num_cached)
        for page, unit_hash in publish_units(worker, seq, seq.num_cached):
            worker.pool.mark_computed(page, unit_hash)

    def expire(self, now: float) -> None:
        """Give up on transfers that were silent for longer than their lease, and forget what is too old to count."""
        self.prefixes.shared.expire(now)
        for pull in self._transfers.expire(now):
            if pull.seq is not None:
                failure = f"silent for longer than its lease of {1000 * self._transfers.lease_s:.0f} ms"
                report = PullReport(pull.pull_id, True, failure=failure)
                pull.seq.request.note_transfer(pull.transfer(pull.seq, report, 0, now), now)
            self._fall_back(pull, now)

    def _fall_back(self, pull: Pull, now: float) -> None:
        """Who waits for it starts over, computed where it is decoded."""
        seq = pull.seq
        if seq is not None:
            seq.local_only = True
            self.take_off(seq)
            self.requeue(seq, now)


def _admission(seq: Sequence, chosen: Placement, placements: list[Placement], now: float) -> Admission:
    pull, room = chosen.pull, chosen.room
    num_local = room.num_cached if pull is None else room.num_shared
    return Admission(
        choice=seq.choice,
        queued_s=seq.queued_s,
        admitted_s=now,
        worker_id=chosen.worker.worker_id,
        cached_tokens=num_local,
        candidates=tuple(p.candidate for p in placements),
        resumed=seq.requeued,
        pulled_tokens=seq.num_cached - room.num_shared if pull is not None else 0,
        pull_source=pull.source.worker_id if pull is not None else None,
        predicted_cached_tokens=num_local,
        role=Role.PREFILL if chosen.hands_off else Role.BOTH,
    )


def _handover(seq: Sequence, worker_id: WorkerId, now: float) -> Admission:
    """It is decoded there from now on."""
    return Admission(
        choice=seq.choice,
        queued_s=now,
        admitted_s=now,
        worker_id=worker_id,
        cached_tokens=seq.num_cached,
        candidates=(),
        resumed=True,
        predicted_cached_tokens=seq.num_cached,
        role=Role.DECODE,
    )
