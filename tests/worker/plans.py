"""Plans and sequences in few words."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.sequences import LiveSequence
from kvstore.prefix_hash import root_hash
from wire.ids import Fence, PageId, PlanId, PullId, RequestId, SeqId
from wire.plan import Child, Decode, KvPull, PageCopy, PageGrant, PrefillChunk, Release, SequenceStart, StepPlan
from wire.sampling import SamplingParams

ROOT = root_hash("fake")
FENCE = Fence(1)


def greedy(max_tokens: int = 1000, **params: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]


def live(
    tokens: Sequence[int], num_prompt: int | None = None, *, sampling: SamplingParams | None = None, choice: int = 0
) -> LiveSequence:
    """A sequence whose next token is to be drawn."""
    return LiveSequence(
        seq_id=SeqId(1),
        incarnation=0,
        request_id=RequestId("r1"),
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        sampling=sampling or greedy(),
        root_hash=ROOT,
        choice=choice,
    )


def grant(pages: Sequence[int], slots: int, first_index: int = 0) -> PageGrant:
    return PageGrant(first_index, [PageId(page) for page in pages], slots)


def chunk(
    seq: int,
    start_pos: int,
    num_tokens: int,
    *,
    pages: PageGrant | None = None,
    tokens: Sequence[int] | None = None,
    num_prompt: int | None = None,
    sampling: SamplingParams | None = None,
    incarnation: int = 0,
    children: Sequence[tuple[int, int]] | None = None,
    traceparent: str = "",
) -> PrefillChunk:
    """`tokens` makes it the first chunk of an incarnation."""
    start = None
    if tokens is not None:
        start = SequenceStart(
            request_id=RequestId(f"r{seq}"),
            token_ids=list(tokens),
            num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
            sampling=sampling or greedy(),
            root_hash=ROOT,
            traceparent=traceparent,
        )
    return PrefillChunk(
        seq_id=SeqId(seq),
        incarnation=incarnation,
        start_pos=start_pos,
        num_tokens=num_tokens,
        grant=pages,
        start=start,
        children=[Child(SeqId(s), c) for s, c in ([(seq, 0)] if children is None else children)],
    )


def decode(seq: int, pages: PageGrant | None = None, *, incarnation: int = 0) -> Decode:
    return Decode(SeqId(seq), incarnation, pages)


def release(seq: int, *, incarnation: int = 0) -> Release:
    return Release(SeqId(seq), incarnation)


def copy(source: int, target: int, num_slots: int) -> PageCopy:
    return PageCopy(PageId(source), PageId(target), num_slots)


def plan(
    plan_id: int,
    *,
    chunks: Sequence[PrefillChunk] = (),
    decodes: Sequence[Decode] = (),
    max_steps: int = 1,
    copies: Sequence[PageCopy] = (),
    releases: Sequence[Release] = (),
    pulls: Sequence[KvPull] = (),
    cancelled_pulls: Sequence[int] = (),
    forgotten: Sequence[int] = (),
    joins: bool = False,
    fence: int = FENCE,
) -> StepPlan:
    return StepPlan(
        PlanId(plan_id),
        Fence(fence),
        prefill_chunks=list(chunks),
        decodes=list(decodes),
        max_steps=max_steps,
        page_copies=list(copies),
        releases=list(releases),
        kv_pulls=list(pulls),
        cancelled_pulls=[PullId(pull_id) for pull_id in cancelled_pulls],
        forgotten_pages=[PageId(page) for page in forgotten],
        joins=joins,
    )
