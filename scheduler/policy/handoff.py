"""From the worker that prefills a sequence to the one that decodes it (design §8). Pure.

    on the prefill worker   | chunk | chunk | last chunk: the first token ▸ parked …         ▸ its pages: cached there
    on the decode worker      pages held │ pull … │ pull … │ the rest         ▸ one small chunk ▸ decodes

The decode worker pulls what is computed while the next chunk runs, whole pages of its own at a time. What follows the
last full unit, the first token included, it computes itself: less than a unit, and a transfer less.

A sequence that is prefilled and finds no room goes before whatever waits for the same decode workers: nothing is
admitted there meanwhile, so that small ones do not take, one by one, the room that a large one waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from scheduler.policy.placement import take_pages
from scheduler.policy.pool_queues import Pools
from scheduler.policy.routing import Router
from scheduler.policy.transfers import Pull, Transfers, release_pages
from scheduler.sequence import SeqState, Sequence
from scheduler.worker_view import WorkerView
from wire.ids import UNIT_TOKENS, PageId, SeqId, WorkerId


@dataclass(slots=True, eq=False)
class Handoff:
    """A sequence's place on the worker that will decode it."""

    target: WorkerView
    pages: list[PageId]
    num_shared_pages: int
    num_units: int
    """Of the sequence, the first so many lie in `pages`."""
    pull: Pull | None = None
    """The next ones, under way."""


class Handoffs:
    """The sequences that run where they will not be decoded. `take_off(seq)` ends what runs on the prefill worker."""

    def __init__(
        self,
        router: Router,
        transfers: Transfers,
        take_off: Callable[[Sequence], None],
        to_plan: dict[WorkerId, None],
    ) -> None:
        self._router = router
        self._transfers = transfers
        self._take_off = take_off
        self._to_plan = to_plan
        self._sequences: dict[SeqId, Sequence] = {}  # in order of admission
        self.awaited: set[WorkerId] = set()
        """Decode workers that a prefilled sequence has no room on."""

    def add(self, seq: Sequence) -> None:
        """It was placed on a worker that only prefills it."""
        self._sequences[seq.seq_id] = seq

    def advance(self, workers: Collection[WorkerView], now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Find places, pull what was computed since; returns those that have just arrived where they are decoded, and
        those that were prefilled and are decoded where they are after all."""
        arrived: list[Sequence] = []
        stayed: list[Sequence] = []
        self.awaited.clear()
        full: set[tuple[WorkerId, Pools]] = set()  # whom those behind do not overtake: nobody starves
        for seq in list(self._sequences.values()):
            if not seq.hands_off or seq.state is not SeqState.RUNNING:
                del self._sequences[seq.seq_id]
                continue
            assert seq.worker is not None
            if seq.parked_s is None and _is_prefilled(seq):
                seq.parked_s = now
            kind = (seq.worker.worker_id, seq.pools)
            if not self._has_place(seq) and kind not in full:
                targets = self._router.handoff_targets(seq, workers, now)
                if not targets:
                    if self._stay(seq, now):
                        stayed.append(seq)
                    continue
                if _has_begun(seq) and not self._find_place(seq, targets, now):
                    full.add(kind)
            if self._advance(seq, now):
                arrived.append(seq)
        return arrived, stayed

    def _has_place(self, seq: Sequence) -> bool:
        """On a worker that still decodes, while its own still does not."""
        assert seq.worker is not None
        handoff = seq.handoff
        if handoff is None:
            return False
        if handoff.target.takes_decodes and not seq.worker.takes_decodes:
            return True
        self.abandon(seq)
        return False

    def _find_place(self, seq: Sequence, targets: list[WorkerView], now: float) -> bool:
        """Hold its pages on the best of the targets; False: none has room now."""
        room = self._router.handoff_room(seq, targets, now)
        if room is None:
            if seq.parked_s is not None:
                self.awaited.update(worker.worker_id for worker in targets)
            return False
        num_shared = len(room.shared_pages)
        seq.handoff = Handoff(room.worker, take_pages(room), num_shared, num_shared * room.worker.pool.units_per_page)
        room.worker.incoming[seq.seq_id] = seq
        return True

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
            self._to_plan[handoff.target.worker_id] = None  # a decode may wait for just these pages

    def lose_target(self, worker: WorkerView) -> None:
        """A worker is gone, and the places on it: another is found, as if there had been none."""
        for seq in worker.incoming.values():
            seq.handoff = None

    def _stay(self, seq: Sequence, now: float) -> bool:
        """No other worker may decode it: better this one than none. False: it is not prefilled yet."""
        assert seq.worker is not None
        self._to_plan[seq.worker.worker_id] = None
        if seq.parked_s is not None:
            seq.request.note_handoff(seq.parked_s, now)
            seq.parked_s = None
        return seq.worker.unpark(seq)

    def _advance(self, seq: Sequence, now: float) -> bool:
        """Pull the next units that are computed; True when there are none any more, and it has moved over."""
        handoff = seq.handoff
        if handoff is None or handoff.pull is not None:
            return False
        is_prefilled = _is_prefilled(seq)
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

    def _complete(self, seq: Sequence, handoff: Handoff, now: float) -> None:
        """Move the sequence over: it runs on, from the KV that lies there."""
        target = handoff.target
        assert seq.parked_s is not None
        seq.request.note_handoff(seq.parked_s, now)
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


def _is_prefilled(seq: Sequence) -> bool:
    """Its first token is there."""
    return len(seq.tokens) > seq.prefill_end


def _has_begun(seq: Sequence) -> bool:
    """Some of it is computed: before, pages held for it elsewhere would lie idle."""
    return seq.parked_s is not None or seq.num_computed > seq.num_cached
