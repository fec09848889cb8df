"""Plans and reports as plain records: what the pure engine and the pure batch builder work with.

wire/worker_codec.py turns them into worker.proto's messages and back; nothing else touches those.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.ids import Epoch, Fence, PageId, PlanId, RequestId, SeqId, UnitHash, WorkerId
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


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's Hello."""

    worker_id: WorkerId
    epoch: Epoch
    role: str
    advertise_address: str
    model: ModelCard
    num_pages: int
    page_size: int
    unit_tokens: int


@dataclass(slots=True)
class PageUnits:
    """Hashes of the units whose KV lies in a page: unit i covers slots [i * unit, (i + 1) * unit)."""

    page_id: PageId
    unit_hashes: list[UnitHash]


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
    source_address: str
    source_epoch: Epoch
    source_pages: list[PageId]
    target_pages: list[PageId]


@dataclass(slots=True)
class Release:
    seq_id: SeqId
    incarnation: int


@dataclass(slots=True)
class StepPlan:
    """What a worker runs next. Order within a plan: releases, page copies, then up to max_steps steps."""

    plan_id: PlanId
    fence: Fence
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)
    decodes: list[Decode] = field(default_factory=list)
    max_steps: int = 1
    page_copies: list[PageCopy] = field(default_factory=list)
    kv_pulls: list[KvPull] = field(default_factory=list)
    releases: list[Release] = field(default_factory=list)


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
