"""Which worker a waiting sequence goes to, and what it reuses there. Pure.

tokens of the sequence   | shared by reference | copied | prefilled here … | last one always computed |
                           whole cached pages    head of  [num_cached, len)
                                                 a page
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from scheduler.commands import RouteCandidate
from scheduler.sequence import SeqState, Sequence
from scheduler.worker_view import WorkerView
from wire.config import BatchingConfig
from wire.errors import ContextLengthExceeded, KVCapacityExceeded, MeshError
from wire.ids import UNIT_TOKENS, PageId
from wire.plan import PageCopy

KV_PRESSURE_TOKENS = 256.0
"""What a full pool weighs, in prefill tokens."""
DECODE_TOKENS = 4.0
"""What one active decode weighs."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a waiting sequence may go, and what it would reuse there."""

    worker: WorkerView
    shared_pages: list[PageId]
    copy_source: PageId | None
    num_cached: int
    num_fresh_pages: int
    candidate: RouteCandidate


def min_chunk_tokens(config: BatchingConfig) -> int:
    """The room every step keeps for prefill: never more than half of a small budget."""
    return min(config.min_chunk_tokens, config.step_token_budget // 2)


def max_running(config: BatchingConfig) -> int:
    """Sequences a worker may run; unless configured, each may decode in every step, beside one minimum chunk."""
    if config.max_running is not None:
        return config.max_running
    return config.step_token_budget - min_chunk_tokens(config)


def fits_ever(seq: Sequence, worker: WorkerView) -> bool:
    """Whether the worker's whole pool and the model's length hold the sequence to its last token."""
    max_tokens = seq.request.spec.sampling.max_tokens
    return seq.max_slots <= worker.capacity_slots and seq.num_prompt + max_tokens <= worker.info.model.max_model_len


def place(seq: Sequence, worker: WorkerView, config: BatchingConfig) -> Placement | None:
    """What admitting the sequence on this worker now would take; None when there is no room now."""
    if worker.admission_barrier is not None or len(worker.running) >= max_running(config):
        return None
    if seq.request.is_suspect and any(other.request.is_suspect for other in worker.running.values()):
        return None
    if worker.queued_prefill_tokens >= config.step_token_budget or not fits_ever(seq, worker):
        return None
    shared, source, num_cached = _reusable(seq, worker)
    fresh = -(-len(seq.tokens) // worker.page_size) - len(shared)
    if not _has_room(worker, [*shared, source] if source is not None else shared, fresh, config):
        if source is None or worker.running:
            return None
        # Alone, with a pool too small for the copy and its source at once: recompute that page instead.
        source, num_cached = None, len(shared) * worker.page_size
        if not _has_room(worker, shared, fresh, config):
            return None
    candidate = RouteCandidate(
        worker_id=worker.worker_id,
        uncached_tokens=float(len(seq.tokens) - num_cached),
        queued_prefill_tokens=float(worker.queued_prefill_tokens),
        kv_pressure=KV_PRESSURE_TOKENS * worker.pool.counts().in_use / worker.pool.num_pages,
        active_decodes=DECODE_TOKENS * len(worker.decoding),
    )
    return Placement(worker, shared, source, num_cached, fresh, candidate)


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
    watermark = int(config.kv_watermark * pool.num_pages) if worker.running else 0
    newly_held = sum(1 for page in reused if pool.is_cached(page))
    return fresh + watermark <= pool.num_available - newly_held


def occupy(seq: Sequence, chosen: Placement) -> None:
    """Take the pages of a placement, and run the sequence on its worker."""
    worker, pool = chosen.worker, chosen.worker.pool
    for page in chosen.shared_pages:
        pool.acquire(page)
    if chosen.copy_source is not None:
        pool.acquire(chosen.copy_source)
    fresh = pool.allocate(chosen.num_fresh_pages)
    if chosen.copy_source is not None:
        num_slots = chosen.num_cached - len(chosen.shared_pages) * worker.page_size
        worker.pending_copies.append(PageCopy(chosen.copy_source, fresh[0], num_slots))
        worker.pending_pins.append(chosen.copy_source)
    seq.state = SeqState.RUNNING
    seq.worker = worker
    seq.incarnation += 1
    seq.pages = chosen.shared_pages + fresh
    seq.granted_slots = len(seq.pages) * worker.page_size
    seq.num_shared_pages = len(chosen.shared_pages)
    seq.num_cached = seq.num_dispatched = seq.num_computed = chosen.num_cached
    seq.prefill_end = len(seq.tokens)
    seq.num_published = len(chosen.shared_pages) * pool.units_per_page
    worker.admit(seq)


def too_large(seq: Sequence, workers: Collection[WorkerView]) -> MeshError:
    """Why no worker ever has room for a sequence."""
    max_tokens = seq.request.spec.sampling.max_tokens
    wanted = f"prompt of {seq.num_prompt} tokens + max_tokens {max_tokens}"
    longest = max(worker.info.model.max_model_len for worker in workers)
    if seq.num_prompt + max_tokens > longest:
        return ContextLengthExceeded(f"{wanted} exceeds the model's {longest} tokens", param="max_tokens")
    capacity = max(worker.capacity_slots for worker in workers)
    return KVCapacityExceeded(f"{wanted} exceeds the KV pool's {capacity} tokens", param="max_tokens")


def choose(placements: Iterable[Placement], break_tie: Callable[[int], int]) -> Placement:
    """The cheapest; a seeded stream breaks ties. A hot prefix's worker loses once its queue outweighs the hit."""
    options = list(placements)
    lowest = min(p.candidate.cost for p in options)
    best = [p for p in options if p.candidate.cost == lowest]
    return best[break_tie(len(best))] if len(best) > 1 else best[0]
