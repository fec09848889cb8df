"""Plans and reports as plain records: what the pure engine and the pure batch builder work with.

wire/worker_codec.py turns them into worker.proto's messages and back; nothing else touches those.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from wire.ids import Epoch, Fence, PageId, PlanId, PullId, RequestId, SeqId, UnitHash, WorkerId
from wire.sampling import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a worker serves; every worker of a cell must say the same."""

    name: str
    revision: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_dtype: str


class Tier(StrEnum):
    """Where a unit's KV lies: in a page of a worker's device, or below it. Fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    REDIS = "redis"


LOWER_TIERS = (Tier.HOST, Tier.DISK, Tier.REDIS)


class Role(StrEnum):
    """What a worker runs: prompts, outputs, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class SharedTier:
    """The Redis tier, as one worker uses it: what any worker stored there, each with the same layout can read."""

    layout: str
    """Names what a unit's bytes mean; never empty."""
    max_units: int
    """What the cell's budget holds."""
    ttl_ms: int
    """From when a unit is stored until it is gone, at the latest."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's Hello."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    advertise_address: str
    model: ModelCard
    num_pages: int
    page_size: int
    unit_tokens: int
    unit_bytes: int = 0
    """K and V of one unit in all layers; 0: it neither gives nor takes KV."""
    host_id: str = ""
    """Equal on two workers that may share memory."""
    min_prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    """The pool it belongs to, by prompt length; 0 and 0: any."""
    shared_tier: SharedTier | None = None
    """None: it has no Redis tier."""


@dataclass(slots=True)
class PageUnits:
    """Hashes of the units whose KV lies in a page: unit i covers slots [i * unit, (i + 1) * unit)."""

    page_id: PageId
    unit_hashes: list[UnitHash]


@dataclass(slots=True)
class TierUnits:
    """Units that entered or left one of a worker's tiers below its KV pages, in this order: dropped, then stored."""

    tier: Tier
    stored: list[UnitHash] = field(default_factory=list)
    dropped: list[UnitHash] = field(default_factory=list)


@dataclass(slots=True)
class Residents:
    """What a worker holds when a session begins: its pages' units, and those of its lower tiers."""

    pages: list[PageUnits] = field(default_factory=list)
    tiers: list[TierUnits] = field(default_factory=list)


@dataclass(slots=True)
class PageGrant:
    """Block-table entries [first_index, first_index + len(page_ids)) of a sequence, and its absolute slot limit."""

    first_index: int
    page_ids: list[PageId]
    granted_slots: int


@dataclass(slots=True)
class SequenceStart:
    """All a worker must know of a sequence, sent with the first chunk of each incarnation.

    token_ids: prompt, then output so far: `[0, num_prompt_tokens) prompt | [num_prompt_tokens, len) output`.
    """

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    root_hash: UnitHash
    traceparent: str


@dataclass(slots=True)
class Child:
    seq_id: SeqId
    choice: int


@dataclass(slots=True)
class PrefillChunk:
    """Positions [start_pos, start_pos + num_tokens) of a sequence; the last one samples its children."""

    seq_id: SeqId
    incarnation: int
    start_pos: int
    num_tokens: int
    grant: PageGrant | None = None
    start: SequenceStart | None = None
    children: list[Child] = field(default_factory=list)


@dataclass(slots=True)
class Decode:
    seq_id: SeqId
    incarnation: int
    grant: PageGrant | None = None


@dataclass(slots=True)
class PageCopy:
    """Copy slots [0, num_slots) of one page into another, K and V, every layer."""

    source_page: PageId
    target_page: PageId
    num_slots: int


@dataclass(slots=True)
class KvPull:
    """Bring consecutive units of one chain into pages of the worker that gets this, filling them from the first slot
    of the first page on. The source is another worker, or its own lower tiers: then it bears its own id."""

    pull_id: PullId
    source_worker_id: WorkerId
    source_address: str
    source_epoch: Epoch
    unit_hashes: list[UnitHash]
    target_pages: list[PageId]
    lease_ms: int
    """The source's pages are pinned so long, from each PullReport on."""


@dataclass(slots=True)
class PullReport:
    """A pull goes on (which renews its lease), or is over: exactly one with `done` for each."""

    pull_id: PullId
    done: bool
    num_units: int = 0
    """The first so many units lie in the target pages; with `done` only."""
    failure: str | None = None
    """Why not all of them."""
    transport: str = ""
    """shm | grpc | nixl | host | disk | redis."""
    num_bytes: int = 0
    """Moved."""
    elapsed_us: int = 0


@dataclass(slots=True)
class Release:
    seq_id: SeqId
    incarnation: int


@dataclass(slots=True)
class StepPlan:
    """What a worker runs next. Order within a plan: releases, cancelled pulls, page copies, pulls begin, then up to
    max_steps steps. Pulls run beside the steps of this plan and later ones."""

    plan_id: PlanId
    fence: Fence
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    max_steps: int = 1
    page_copies: list[PageCopy] = field(default_factory=list)
    kv_pulls: list[KvPull] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)
    cancelled_pulls: list[PullId] = field(default_factory=list)
    """Nobody wants them any more: they end soon, in a PullReport all the same."""
    forgotten_pages: list[PageId] = field(default_factory=list)
    """Free ones that hold units only the worker knows of, by an audit: they are void, before anything else."""
    joins: bool = False
    """May share the first step of the plan before it, unless that has begun; its decodes are then those of both."""


@dataclass(slots=True)
class Progress:
    """What one sequence gained in one step."""

    seq_id: SeqId
    incarnation: int
    num_computed: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(slots=True)
class StepTiming:
    """Measured on the worker."""

    started_unix_ns: int
    build_us: int
    forward_us: int
    sample_us: int
    prefill_tokens: int
    decode_tokens: int
    context_tokens: int

    @property
    def step_us(self) -> int:
        return self.build_us + self.forward_us + self.sample_us


@dataclass(slots=True)
class StepReport:
    """One per step, and one (with no progress, step 0) for a plan without a step."""

    plan_id: PlanId
    step: int
    plan_done: bool
    progress: list[Progress]
    timing: StepTiming | None = None
    failure: str | None = None
