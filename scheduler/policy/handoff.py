"""From the worker that prefills a sequence to the one that decodes it (design §8). Pure.

    on the prefill worker   | chunk | chunk | last chunk: the first token ▸ parked …         ▸ its pages: cached there
    on the decode worker      pages held │ pull … │ pull … │ the rest         ▸ one small chunk ▸ decodes

The decode worker pulls what is computed while the next chunk runs, whole pages of its own at a time. What follows the
last full unit, the first token included, it computes itself: less than a unit, and a transfer less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from scheduler.policy.placement import take_pages
from scheduler.policy.routing import Router
from scheduler.policy.transfers import Pull, Transfers, release_pages
from scheduler.sequence import SeqState, Sequence
from scheduler.worker_view import WorkerView
from wire.ids import UNIT_TOKENS, PageId, SeqId


@dataclass(slots=True, eq=False)
class Handoff:
    """A sequence's place on the worker that will decode it."""

    target: WorkerView
    pages: list[PageId]
    num_shared_pages: int
    num_units: int
    """Of the sequence, the first so many lie in `pages`."""
    parked_s: float | None = None
    """Since when nothing of it runs: its prefill is over."""
    pull: Pull | None = None
    """The next ones, under way."""


class Handoffs:
    """The sequences that run where they will not be decoded. `take_off(seq)` ends what runs on the prefill worker."""

    def __init__(self, router: Router, transfers: Transfers, take_off: Callable[[Sequence], None]) -> None:
        self._router = router
        self._transfers = transfers
        self._take_off = take_off
        self._sequences: dict[SeqId, Sequence] = {}

    def add(self, seq: Sequence) -> None:
        """It was placed on a worker that only prefills it."""
        self._sequences[seq.seq_id] = seq

    def advance(self, workers: Collection[WorkerView], now: float) -> list[Sequence]:
        """Find places, pull what was computed since; returns those that have just arrived where they are decoded."""
        arrived: list[Sequence] = []
        if not self._sequences:
            return arrived
        for seq in list(self._sequences.values()):
            if not seq.hands_off or seq.state is not SeqState.RUNNING:
                del self._sequences[seq.seq_id]
            elif not any(worker.takes_decodes for worker in workers):
                self._stay(seq)
            elif self._advance(seq, workers, now):
                arrived.append(seq)
        return arrived

    def pulled(self, seq: Sequence, handoff: Handoff, num_units: int) -> None:
        """A pull for it is over; it brought num_units."""
        target, first = handoff.target, handoff.num_units
        handoff.pull = None
        for unit in range(first, first + num_units):
            page, unit_hash = handoff.pages[unit // target.pool.units_per_page], seq.hashes[unit]
            target.pool.publish(page, unit_hash)
            target.pool.mark_computed(page, unit_hash)
        handoff.num_units += num_units

    def abandon(self, seq: Sequence) -> None:
        """Give up its place; what runs on the prefill worker is the caller's business."""
        handoff, seq.handoff = seq.handoff, None
        if handoff is not None:
            if handoff.pull is not None:
                self._transfers.abandon(handoff.pull)
            release_pages(handoff.target, handoff.pages, handoff.pull)
            del handoff.target.incoming[seq.seq_id]

    def lose_target(self, worker: WorkerView) -> None:
        """A worker is gone, and the places on it: another is found, as if there had been none."""
        for seq in worker.incoming.values():
            seq.handoff = None

    def _stay(self, seq: Sequence) -> None:
        """No worker decodes any more: better this one than none."""
        assert seq.worker is not None
        seq.worker.unpark(seq)

    def _advance(self, seq: Sequence, workers: Collection[WorkerView], now: float) -> bool:
        is_prefilled = len(seq.tokens) > seq.prefill_end
        if seq.handoff is None and (is_prefilled or seq.num_computed > seq.num_cached):
            self._begin(seq, workers, now)
        handoff = seq.handoff
        if handoff is None or handoff.pull is not None:
            return False
        if is_prefilled and handoff.parked_s is None:
            handoff.parked_s = now
        per_page = handoff.target.pool.units_per_page
        computed = min(seq.num_computed, seq.prefill_end) // UNIT_TOKENS
        end = computed if is_prefilled else computed - computed % per_page
        if end > handoff.num_units:
            pages = handoff.pages[handoff.num_units // per_page : -(-end // per_page)]
            assert seq.worker is not None
            handoff.pull = self._transfers.begin(
                seq, seq.worker, handoff.target, first_unit=handoff.num_units, end_unit=end, pages=pages, now=now
            )
            return False
        if is_prefilled:
            self._complete(seq, handoff, now)
        return is_prefilled

    def _begin(self, seq: Sequence, workers: Collection[WorkerView], now: float) -> None:
        rooms = self._router.handoff_rooms(seq, workers, now)
        if not rooms:
            return
        room = rooms[0]
        num_shared = len(room.shared_pages)
        units = num_shared * room.worker.pool.units_per_page
        seq.handoff = Handoff(room.worker, take_pages(room), num_shared, units)
        room.worker.incoming[seq.seq_id] = seq

    def _complete(self, seq: Sequence, handoff: Handoff, now: float) -> None:
        """Move the sequence over: it runs on, from the KV that lies there."""
        target = handoff.target
        seq.request.note_handoff(handoff.parked_s or now, now)
        seq.handoff = None
        del target.incoming[seq.seq_id]
        self._take_off(seq)
        seq.leave_worker()
        seq.state = SeqState.RUNNING
        seq.worker = target
        seq.incarnation += 1
        seq.pages = handoff.pages
        seq.granted_slots = len(handoff.pages) * target.page_size
        seq.num_shared_pages = handoff.num_shared_pages
        seq.num_published = handoff.num_units
        seq.num_cached = seq.num_dispatched = seq.num_computed = handoff.num_units * UNIT_TOKENS
        seq.prefill_end = len(seq.tokens)
        target.admit(seq)
