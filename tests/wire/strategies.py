"""hypothesis strategies for everything that crosses a process boundary, over the whole range its encoding carries."""

from __future__ import annotations

from hypothesis import strategies as st

from wire.entries import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    CancelEntry,
    CellCard,
    CellWorker,
    ChoiceReply,
    ReplyEntry,
    RequestEntry,
    RequestStats,
    TerminalReply,
    TokensReply,
    WorkerEntry,
)
from wire.plan import (
    LOWER_TIERS,
    Child,
    Decode,
    KvPull,
    ModelCard,
    PageCopy,
    PageGrant,
    PageUnits,
    PrefillChunk,
    Progress,
    PullReport,
    Release,
    Residents,
    Role,
    SequenceStart,
    SharedTier,
    StepPlan,
    StepReport,
    StepTiming,
    TierUnits,
    WorkerInfo,
)
from wire.sampling import FinishReason, SamplingParams, TokenLogprobs

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
text = st.text(max_size=12)
number = st.floats(-1e300, 1e300)
seconds = st.floats(0, 1e12)
float32 = st.floats(width=32, allow_nan=False)
"""What a protobuf float carries; −∞ is a log-probability too."""


def few(elements: st.SearchStrategy[int], max_size: int = 4) -> st.SearchStrategy[list[int]]:
    return st.lists(elements, max_size=max_size)


u32s = few(u32)
unit_hashes = st.lists(st.binary(min_size=32, max_size=32), max_size=3)

i31 = st.integers(0, 2**31 - 1)
sampling = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31 - 1),
    min_tokens=i31,
    temperature=st.floats(0, 1e300),
    top_k=i31,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 1e300, exclude_min=True),
    presence_penalty=number,
    frequency_penalty=number,
    logit_bias=st.lists(st.tuples(u32, number), max_size=3).map(tuple),
    seed=u64,
    stop_token_ids=u32s.map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, MAX_LOGPROBS),
)
token_logprobs = st.builds(TokenLogprobs, logprob=float32, top_ids=u32s, top_logprobs=st.lists(float32, max_size=4))

# wire.entries

request_entries = st.builds(
    RequestEntry,
    request_id=text,
    gateway_id=text,
    prompt=few(u32, 40),
    sampling=sampling,
    num_choices=st.integers(1, MAX_CHOICES),
    tenant=text,
    priority=st.integers(-(2**31) + 1, 2**31 - 1),
    deadline_unix_s=st.none() | seconds,
    arrived_unix_s=seconds,
    salt=text,
    traceparent=text,
)
cancel_entries = st.builds(CancelEntry, request_id=text, reason=text, choice=st.none() | i31)
request_stats = st.builds(
    RequestStats,
    prompt_tokens=u32,
    cached_tokens=u32,
    output_tokens=u32,
    queue_s=seconds,
    prefill_s=seconds,
    decode_s=seconds,
    stall_s=seconds,
    transfer_s=seconds,
    preemptions=u32,
    worker_id=text,
)
reply_items = st.one_of(
    st.builds(
        TokensReply,
        request_id=text,
        choice=u32,
        position=u32,
        tokens=u32s,
        logprobs=st.none() | st.lists(token_logprobs, max_size=3),
    ),
    st.builds(ChoiceReply, request_id=text, choice=u32, num_tokens=u32, finish_reason=st.sampled_from(FinishReason)),
    st.builds(
        TerminalReply,
        request_id=text,
        error_code=st.none() | text,
        error_message=st.none() | text,
        retry_after_s=st.none() | seconds,
        stats=request_stats,
    ),
)
reply_entries = st.builds(ReplyEntry, fence=u64, items=st.lists(reply_items, max_size=4))
worker_entries = st.builds(WorkerEntry, worker_id=text, address=text, epoch=u64, pid=u32, role=st.sampled_from(Role))
cell_cards = st.builds(
    CellCard,
    model_name=text,
    model_revision=text,
    vocab_size=u32,
    max_model_len=u32,
    max_request_tokens=u32,
    eos_token_ids=u32s,
    num_workers=u32,
    fence=u64,
    predicted_drain_s=seconds,
    workers=st.lists(st.builds(CellWorker, worker_id=text, role=st.sampled_from(Role), running=u32), max_size=3),
)

# wire.plan

grants = st.builds(PageGrant, first_index=u32, page_ids=u32s, granted_slots=u32)
starts = st.builds(
    SequenceStart,
    request_id=text,
    token_ids=u32s,
    num_prompt_tokens=u32,
    sampling=sampling,
    root_hash=st.binary(min_size=32, max_size=32),
    traceparent=text,
)
prefill_chunks = st.builds(
    PrefillChunk,
    seq_id=u64,
    incarnation=u32,
    start_pos=u32,
    num_tokens=u32,
    grant=st.none() | grants,
    start=st.none() | starts,
    children=st.lists(st.builds(Child, seq_id=u64, choice=u32), max_size=3),
)
step_plans = st.builds(
    StepPlan,
    plan_id=u64,
    fence=u64,
    prefill_chunks=st.lists(prefill_chunks, max_size=2),
    decodes=st.lists(st.builds(Decode, seq_id=u64, incarnation=u32, grant=st.none() | grants), max_size=3),
    max_steps=u32,
    page_copies=st.lists(st.builds(PageCopy, source_page=u32, target_page=u32, num_slots=u32), max_size=2),
    kv_pulls=st.lists(
        st.builds(
            KvPull,
            pull_id=u64,
            source_worker_id=text,
            source_address=text,
            source_epoch=u64,
            unit_hashes=unit_hashes,
            target_pages=u32s,
            lease_ms=u32,
        ),
        max_size=2,
    ),
    releases=st.lists(st.builds(Release, seq_id=u64, incarnation=u32), max_size=3),
    cancelled_pulls=few(u64),
    forgotten_pages=u32s,
    joins=st.booleans(),
)
progress = st.builds(
    Progress,
    seq_id=u64,
    incarnation=u32,
    num_computed=u32,
    tokens=u32s,
    logprobs=st.none() | st.lists(token_logprobs, min_size=1, max_size=3),
    finish_reason=st.none() | st.sampled_from(FinishReason),
    error=st.none() | st.text(min_size=1, max_size=12),
)
step_timings = st.builds(
    StepTiming,
    started_unix_ns=u64,
    build_us=u32,
    forward_us=u32,
    sample_us=u32,
    prefill_tokens=u32,
    decode_tokens=u32,
    context_tokens=u64,
)
step_reports = st.builds(
    StepReport,
    plan_id=u64,
    step=u32,
    plan_done=st.booleans(),
    progress=st.lists(progress, max_size=3),
    timing=st.none() | step_timings,
    failure=st.none() | st.text(min_size=1, max_size=12),
)
model_cards = st.builds(
    ModelCard,
    name=text,
    revision=text,
    architecture=text,
    vocab_size=u32,
    max_model_len=u32,
    eos_token_ids=u32s.map(tuple),
    kv_dtype=text,
)
worker_infos = st.builds(
    WorkerInfo,
    worker_id=text,
    epoch=u64,
    role=st.sampled_from(Role),
    advertise_address=text,
    model=model_cards,
    num_pages=u32,
    page_size=u32,
    unit_tokens=u32,
    unit_bytes=u64,
    host_id=text,
    min_prompt_tokens=u32,
    max_prompt_tokens=u32,
    shared_tier=st.none() | st.builds(SharedTier, layout=st.text(min_size=1, max_size=12), max_units=u64, ttl_ms=u64),
)
page_units = st.builds(PageUnits, page_id=u32, unit_hashes=unit_hashes)
tier_units = st.builds(TierUnits, tier=st.sampled_from(LOWER_TIERS), stored=unit_hashes, dropped=unit_hashes)
residents = st.builds(Residents, pages=st.lists(page_units, max_size=3), tiers=st.lists(tier_units, max_size=2))
pull_reports = st.builds(
    PullReport,
    pull_id=u64,
    done=st.booleans(),
    num_units=u32,
    failure=st.none() | st.text(min_size=1, max_size=12),
    transport=text,
    num_bytes=u64,
    elapsed_us=u32,
)
