"""One choice of one request, as the engine follows it. Pure.

    prefill   [0, num_cached) reused or pulled | [num_cached, num_dispatched) sent | [num_dispatched, prefill_end) to do
    decode    the worker owns the next position; we learn it from reports: num_computed

`tokens` holds the prompt and every output token that was reported: `[0, num_prompt) prompt | [num_prompt, len) output`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvstore.prefix_hash import chain
from scheduler.commands import Admission, Timeline, Transfer
from scheduler.events import Request
from wire.entries import RequestStats, TerminalReply
from wire.errors import MeshError
from wire.ids import UNIT_TOKENS, GatewayId, PageId, RequestId, SeqId, UnitHash
from wire.plan import Decode
from wire.sampling import FinishReason

if TYPE_CHECKING:
    from scheduler.policy.fair_queue import Tenant
    from scheduler.policy.handoff import Handoff
    from scheduler.policy.pool_queues import Pools
    from scheduler.policy.transfers import Pull
    from scheduler.worker_view import WorkerView


class SeqState(Enum):
    WAITING = auto()
    """In its tenant's queue, or behind its first sibling's prefill."""
    RUNNING = auto()
    """Placed on a worker; holds pages there."""
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """First what every token needs, side by side: with thousands of sequences, each cache line counts."""

    seq_id: SeqId
    request: LiveRequest
    choice: int
    tokens: list[int]
    num_prompt: int
    request_id: RequestId = field(init=False)
    gateway_id: GatewayId = field(init=False)
    incarnation: int = 0
    """Counts admissions; reports of an older one are stale."""
    num_computed: int = 0
    num_published: int = 0
    """Units of `hashes` findable in the worker's pool through this sequence's own pages."""
    renew_at: int = 0
    """Position at which WorkerView.watch_grant looks at the grant again."""
    has_streamed: bool = False
    """A token of it was published, by this engine."""
    tenant: Tenant | None = None
    """Whose queue it was pushed to, and who is charged; None until then."""

    state: SeqState = SeqState.WAITING
    queued_s: float = 0.0
    finish_reason: FinishReason | None = None
    worker: WorkerView | None = None
    pages: list[PageId] = field(default_factory=list)
    granted_slots: int = 0
    """KV slots of `pages`: the worker never runs past them."""
    decode: Decode = field(default_factory=lambda: Decode(SeqId(0), 0))
    """While it runs: its entry in a plan that grants it nothing, the same one in every plan of an incarnation."""
    num_shared_pages: int = 0
    """The first of `pages`, shared by reference."""
    num_cached: int = 0
    num_dispatched: int = 0
    prefill_end: int = 0
    """Tokens known at admission: all of them are prefilled, the last one samples."""
    hashes: list[UnitHash] = field(default_factory=list)
    """Of every full unit of `tokens` known so far."""
    requeued: bool = False
    """Was admitted before; goes first in its tenant's queue and is not charged again."""
    pull: Pull | None = None
    """Brings [first page without KV, num_cached) into its pages; nothing of it is dispatched before."""
    hands_off: bool = False
    """Only prefilled where it runs: another worker decodes it (policy/handoff.py)."""
    handoff: Handoff | None = None
    parked_s: float | None = None
    """Since when nothing of it runs: it is prefilled, and another worker has not got all of it yet."""
    pools: Pools = ()
    """Whose queue it waits in; empty: it did not wait yet, or no pool was for its prompt."""
    local_only: bool = False
    """A transfer of its KV failed: it is computed where it decodes."""

    def __post_init__(self) -> None:
        self.request_id, self.gateway_id = self.request.spec.request_id, self.request.spec.gateway_id

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_slots(self) -> int:
        """KV slots it can ever need: the last sampled token is never fed back."""
        return self.num_prompt + self.request.spec.sampling.max_tokens - 1

    @property
    def is_prefilling(self) -> bool:
        return self.num_dispatched < self.prefill_end

    @property
    def next_position(self) -> int:
        """First position a decode may run at next, as far as known: a dispatched prefill counts as run."""
        return max(self.num_computed, self.num_dispatched)

    def unit_hashes(self) -> list[UnitHash]:
        """Hashes of all full units of the tokens known now; only new ones are computed."""
        if (len(self.hashes) + 1) * UNIT_TOKENS <= len(self.tokens):
            parent = self.hashes[-1] if self.hashes else self.request.spec.root_hash
            self.hashes += chain(parent, self.tokens, len(self.hashes) * UNIT_TOKENS)
        return self.hashes

    def leave_worker(self) -> None:
        """Back to the queue's state; the caller has dealt with the pages."""
        self.state = SeqState.WAITING
        self.worker = None
        self.pull = self.handoff = self.parked_s = None
        self.hands_off = False
        self.pages = []
        self.granted_slots = self.renew_at = 0
        self.num_shared_pages = self.num_cached = self.num_published = 0
        self.num_dispatched = self.prefill_end = self.num_computed = 0


SUSPECT_FAULTS = 2
"""Faults in a row that make a request a suspect: it runs apart from other suspects, so that the culprit is found."""
MAX_FAULTS = 3
"""Faults in a row that end a request."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request without a terminal, and what is counted about it."""

    spec: Request
    arrived_order: int
    sequences: list[Sequence] = field(default_factory=list)
    held_back: list[Sequence] = field(default_factory=list)
    """Siblings that wait for the first choice's prefill, to share its pages."""
    stats: RequestStats = field(default_factory=RequestStats)
    timeline: Timeline = field(default_factory=lambda: Timeline(arrived_s=0.0))
    stalled_since_s: float | None = None
    late_transfer_s: float = 0.0
    """Of stats.transfer_s, what came after the first token."""
    faults: int = 0
    """Steps that failed and workers that died under it since its last token."""

    @property
    def is_suspect(self) -> bool:
        return self.faults >= SUSPECT_FAULTS

    def note_admission(self, admission: Admission) -> None:
        self.timeline.admissions.append(admission)
        self.stats.worker_id = admission.worker_id
        if self.stalled_since_s is not None:
            self.stats.stall_s += admission.admitted_s - self.stalled_since_s
            self.stalled_since_s = None
        if len(self.timeline.admissions) == 1:
            self.stats.queue_s = admission.admitted_s - self.timeline.arrived_s
            self.stats.cached_tokens = admission.cached_tokens

    def note_first_token(self, now: float) -> None:
        """The first token of one of its choices."""
        if self.timeline.first_token_s is None:
            self.timeline.first_token_s = now
            self.stats.prefill_s = max(0.0, now - self.timeline.admissions[0].admitted_s - self.stats.transfer_s)

    def note_transfer(self, transfer: Transfer, now: float) -> None:
        """KV of one of its sequences arrived, or did not; nothing of that one ran meanwhile, unless it is handed off
        while it is prefilled."""
        self.timeline.transfers.append(transfer)
        if transfer.is_handoff:
            return
        first_token_s = self.timeline.first_token_s
        if first_token_s is None:
            self.stats.transfer_s += now - transfer.begun_s
        else:
            self.note_handoff(max(transfer.begun_s, first_token_s), now)

    def note_cached(self, num_tokens: int) -> None:
        """What a pull brought at the first admission is a cache hit as well."""
        if len(self.timeline.admissions) == 1:
            self.stats.cached_tokens = num_tokens

    def note_handoff(self, parked_s: float, now: float) -> None:
        """One of its sequences has had its first token, and nothing of it ran since parked_s while its KV moved."""
        self.stats.transfer_s += now - parked_s
        self.late_transfer_s += now - parked_s

    def note_stall(self, now: float) -> None:
        """One of its sequences waits again: a stall, if the client has read something already."""
        if self.timeline.first_token_s is not None and self.stalled_since_s is None:
            self.stalled_since_s = now

    def terminal(self, now: float, error: MeshError | None) -> TerminalReply:
        """It is over, with `error` if that is why."""
        stats, timeline = self.stats, self.timeline
        timeline.finished_s = now
        stats.output_tokens = sum(seq.num_output for seq in self.sequences)
        if self.stalled_since_s is not None:
            stats.stall_s += now - self.stalled_since_s
        if timeline.first_token_s is not None:
            stats.decode_s = max(0.0, now - timeline.first_token_s - stats.stall_s - self.late_transfer_s)
        return TerminalReply(
            self.spec.request_id,
            error_code=error.code if error else None,
            error_message=error.message if error else None,
            retry_after_s=error.retry_after_s if error else None,
            stats=stats,
        )
