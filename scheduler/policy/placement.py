"""Room for a waiting sequence on a worker, and what it reuses there. Pure.

tokens of the sequence   | shared by reference | copied or pulled | prefilled here … | last one always computed |
                           whole cached pages    head of a page
                                                 or whole pages
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from scheduler.commands import RouteCandidate
from scheduler.policy.transfers import Transfers
from scheduler.sequence import SeqState, Sequence
from scheduler.worker_view import WorkerView
from wire.config import BatchingConfig
from wire.errors import ContextLengthExceeded, KVCapacityExceeded, MeshError
from wire.ids import UNIT_TOKENS, PageId
from wire.plan import PageCopy


@dataclass(frozen=True, slots=True)
class Room:
    """A worker that could take a waiting sequence now, and what it would reuse of its own pages."""

    worker: WorkerView
    shared_pages: list[PageId]
    copy_source: PageId | None
    num_cached: int
    num_fresh_pages: int

    @property
    def num_shared(self) -> int:
        """Tokens in the shared pages."""
        return len(self.shared_pages) * self.worker.page_size


@dataclass(frozen=True, slots=True)
class PullOption:
    """Units [first_unit, end_unit) of a waiting sequence could come from another worker, or from the lower tiers of
    the one it would run on (then the source is that one)."""

    source: WorkerView
    first_unit: int
    end_unit: int
    pull_s: float
    """Predicted."""
    prefill_s: float
    """Predicted for computing the same instead."""

    @property
    def is_worth_it(self) -> bool:
        return self.pull_s < self.prefill_s


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting sequence may go, and how it would begin there."""

    room: Room
    pull: PullOption | None
    """What is pulled; in place of the copied page."""
    hands_off: bool
    """Only prefilled there."""
    candidate: RouteCandidate

    @property
    def worker(self) -> WorkerView:
        return self.room.worker


def min_chunk_tokens(config: BatchingConfig) -> int:
    """The room every step keeps for prefill: never more than half of a small budget."""
    return min(config.min_chunk_tokens, config.step_token_budget // 2)


def max_running(config: BatchingConfig) -> int:
    """Sequences a worker may run; unless configured, the other half of every step is left to prefill."""
    if config.max_running is not None:
        return config.max_running
    return max(1, config.step_token_budget // 2)


def fits_ever(seq: Sequence, worker: WorkerView) -> bool:
    """Whether the worker's whole pool and the model's length hold the sequence to its last token."""
    max_tokens = seq.request.spec.sampling.max_tokens
    return seq.max_slots <= worker.capacity_slots and seq.num_prompt + max_tokens <= worker.info.model.max_model_len


def find_room(seq: Sequence, worker: WorkerView, config: BatchingConfig, *, more_tokens: int = 0) -> Room | None:
    """What admitting the sequence, with so many tokens more, on this worker now would take; None when there is no room
    now."""
    if worker.admission_barrier is not None or worker.num_held >= max_running(config):
        return None
    if seq.request.is_suspect and any(other.request.is_suspect for other in worker.running.values()):
        return None
    if worker.queued_prefill_tokens >= config.step_token_budget or not fits_ever(seq, worker):
        return None
    shared, source, num_cached = _reusable(seq, worker)
    fresh = -(-(len(seq.tokens) + more_tokens) // worker.page_size) - len(shared)
    if not _has_room(worker, [*shared, source] if source is not None else shared, fresh, config):
        if source is None or worker.num_held:
            return None
        # Alone, with a pool too small for the copy and its source at once: recompute that page instead.
        source, num_cached = None, len(shared) * worker.page_size
        if not _has_room(worker, shared, fresh, config):
            return None
    return Room(worker, shared, source, num_cached, fresh)


def _reusable(seq: Sequence, worker: WorkerView) -> tuple[list[PageId], PageId | None, int]:
    """(pages shared by reference, page to copy the next head from, tokens that need no computing)."""
    match = worker.pool.match(seq.unit_hashes())
    size = worker.page_size
    # A whole-prompt hit recomputes its last token into a copy of the last page, for its logits.
    matched = len(match.full_pages) * size + match.partial_units * UNIT_TOKENS
    num_cached = min(matched, len(seq.tokens) - 1)
    num_shared = num_cached // size
    if num_cached == num_shared * size:
        return match.full_pages[:num_shared], None, num_cached
    source = match.full_pages[num_shared] if num_shared < len(match.full_pages) else match.partial_page
    return match.full_pages[:num_shared], source, num_cached


def _has_room(worker: WorkerView, reused: list[PageId], fresh: int, config: BatchingConfig) -> bool:
    """Fresh pages fit beside the reused ones and, unless the worker is empty, above the watermark."""
    pool = worker.pool
    watermark = int(config.kv_watermark * pool.num_pages) if worker.num_held else 0
    newly_held = sum(1 for page in reused if pool.is_cached(page))
    return fresh + watermark <= pool.num_available - newly_held


def occupy(seq: Sequence, chosen: Placement, transfers: Transfers, now: float) -> None:
    """Take the pages of a placement, and run the sequence on its worker, from what lies there or is pulled on."""
    room, worker = chosen.room, chosen.worker
    pages = take_pages(room)
    seq.state = SeqState.RUNNING
    seq.worker = worker
    seq.incarnation += 1
    seq.pages = pages
    seq.granted_slots = len(pages) * worker.page_size
    seq.num_shared_pages = len(room.shared_pages)
    seq.num_published = len(room.shared_pages) * worker.pool.units_per_page
    seq.prefill_end = len(seq.tokens)
    seq.hands_off = chosen.hands_off
    num_cached = room.num_cached
    if (pull := chosen.pull) is not None:
        num_cached = pull.end_unit * UNIT_TOKENS
        last = -(-num_cached // worker.page_size)
        seq.pull = transfers.begin(
            seq,
            pull.source,
            worker,
            first_unit=pull.first_unit,
            end_unit=pull.end_unit,
            pages=pages[len(room.shared_pages) : last],
            now=now,
        )
    elif room.copy_source is not None:
        worker.pool.acquire(room.copy_source)
        worker.pending_copies.append(
            PageCopy(room.copy_source, pages[seq.num_shared_pages], num_cached - room.num_shared)
        )
        worker.pending_pins.append(room.copy_source)
    seq.num_cached = seq.num_dispatched = seq.num_computed = num_cached
    worker.admit(seq)


def take_pages(room: Room) -> list[PageId]:
    """Hold what a sequence shares, and fresh pages for the rest of it; the page to copy from stays reusable."""
    pool = room.worker.pool
    held = room.shared_pages if room.copy_source is None else [*room.shared_pages, room.copy_source]
    for page in held:
        pool.acquire(page)
    fresh = pool.allocate(room.num_fresh_pages)
    pool.release(held[len(room.shared_pages) :])
    return room.shared_pages + fresh


def too_large(seq: Sequence, workers: Collection[WorkerView]) -> MeshError:
    """Why no worker ever has room for a sequence."""
    max_tokens = seq.request.spec.sampling.max_tokens
    wanted = f"prompt of {seq.num_prompt} tokens + max_tokens {max_tokens}"
    longest = max(worker.info.model.max_model_len for worker in workers)
    if seq.num_prompt + max_tokens > longest:
        return ContextLengthExceeded(f"{wanted} exceeds the model's {longest} tokens", param="max_tokens")
    capacity = max(worker.capacity_slots for worker in workers)
    return KVCapacityExceeded(f"{wanted} exceeds the KV pool's {capacity} tokens", param="max_tokens")
