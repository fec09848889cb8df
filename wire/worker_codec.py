"""wire.plan records ⇄ worker.proto messages. The only file that touches the generated classes' fields."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from wire import worker_pb2 as pb
from wire.errors import EntryMalformed
from wire.ids import Epoch, Fence, PageId, PlanId, PullId, RequestId, SeqId, UnitHash, WorkerId
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
    Tier,
    TierUnits,
    WorkerInfo,
)
from wire.sampling import FinishReason, SamplingParams, TokenLogprobs

_PLAIN_SAMPLING = [f.name for f in fields(SamplingParams) if f.name not in ("logit_bias", "stop_token_ids", "logprobs")]


def encode_sampling(p: SamplingParams) -> pb.Sampling:
    message = pb.Sampling(
        bias_ids=[t for t, _ in p.logit_bias],
        bias_values=[b for _, b in p.logit_bias],
        stop_token_ids=p.stop_token_ids,
        **{name: getattr(p, name) for name in _PLAIN_SAMPLING},
    )
    if p.logprobs is not None:
        message.logprobs = p.logprobs
    return message


def decode_sampling(m: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        logit_bias=tuple(zip(m.bias_ids, m.bias_values, strict=True)),
        stop_token_ids=tuple(m.stop_token_ids),
        logprobs=m.logprobs if m.HasField("logprobs") else None,
        **{name: getattr(m, name) for name in _PLAIN_SAMPLING},
    )


def _encode_grant(g: PageGrant | None) -> pb.PageGrant | None:
    if g is None:
        return None
    return pb.PageGrant(first_index=g.first_index, page_ids=g.page_ids, granted_slots=g.granted_slots)


def _decode_grant(has: bool, m: pb.PageGrant) -> PageGrant | None:
    return PageGrant(m.first_index, [PageId(p) for p in m.page_ids], m.granted_slots) if has else None


def _encode_chunk(c: PrefillChunk) -> pb.PrefillChunk:
    start = None
    if c.start is not None:
        start = pb.SequenceStart(
            request_id=c.start.request_id,
            token_ids=c.start.token_ids,
            num_prompt_tokens=c.start.num_prompt_tokens,
            sampling=encode_sampling(c.start.sampling),
            root_hash=c.start.root_hash,
            traceparent=c.start.traceparent,
        )
    return pb.PrefillChunk(
        seq_id=c.seq_id,
        incarnation=c.incarnation,
        start=start,
        start_pos=c.start_pos,
        num_tokens=c.num_tokens,
        grant=_encode_grant(c.grant),
        children=[pb.Child(seq_id=k.seq_id, choice=k.choice) for k in c.children],
    )


def _decode_chunk(m: pb.PrefillChunk) -> PrefillChunk:
    start = None
    if m.HasField("start"):
        start = SequenceStart(
            request_id=RequestId(m.start.request_id),
            token_ids=list(m.start.token_ids),
            num_prompt_tokens=m.start.num_prompt_tokens,
            sampling=decode_sampling(m.start.sampling),
            root_hash=UnitHash(m.start.root_hash),
            traceparent=m.start.traceparent,
        )
    return PrefillChunk(
        seq_id=SeqId(m.seq_id),
        incarnation=m.incarnation,
        start_pos=m.start_pos,
        num_tokens=m.num_tokens,
        grant=_decode_grant(m.HasField("grant"), m.grant),
        start=start,
        children=[Child(SeqId(k.seq_id), k.choice) for k in m.children],
    )


def encode_plan(p: StepPlan) -> pb.StepPlan:
    plain = [d for d in p.decodes if d.grant is None]
    granted = [(i, d) for i, d in enumerate(p.decodes) if d.grant is not None]
    return pb.StepPlan(
        plan_id=p.plan_id,
        fence=p.fence,
        prefill_chunks=[_encode_chunk(c) for c in p.prefill_chunks],
        decodes=[
            pb.Decode(seq_id=d.seq_id, incarnation=d.incarnation, grant=_encode_grant(d.grant)) for _, d in granted
        ],
        decodes_at=[i for i, _ in granted],
        plain_decodes=pb.PlainDecodes(seq_ids=[d.seq_id for d in plain], incarnations=[d.incarnation for d in plain]),
        max_steps=p.max_steps,
        page_copies=[
            pb.PageCopy(source_page=c.source_page, target_page=c.target_page, num_slots=c.num_slots)
            for c in p.page_copies
        ],
        kv_pulls=[_encode_pull(k) for k in p.kv_pulls],
        releases=[pb.Release(seq_id=r.seq_id, incarnation=r.incarnation) for r in p.releases],
        cancelled_pulls=p.cancelled_pulls,
        forgotten_pages=p.forgotten_pages,
        joins=p.joins,
    )


def _encode_pull(k: KvPull) -> pb.KvPull:
    return pb.KvPull(
        pull_id=k.pull_id,
        source_worker_id=k.source_worker_id,
        source_address=k.source_address,
        source_epoch=k.source_epoch,
        unit_hashes=k.unit_hashes,
        target_pages=k.target_pages,
        lease_ms=k.lease_ms,
    )


def _decode_pull(m: pb.KvPull) -> KvPull:
    return KvPull(
        pull_id=PullId(m.pull_id),
        source_worker_id=WorkerId(m.source_worker_id),
        source_address=m.source_address,
        source_epoch=Epoch(m.source_epoch),
        unit_hashes=[UnitHash(h) for h in m.unit_hashes],
        target_pages=[PageId(p) for p in m.target_pages],
        lease_ms=m.lease_ms,
    )


def _decode_decodes(m: pb.StepPlan) -> list[Decode]:
    plain = m.plain_decodes
    if len(plain.seq_ids) != len(plain.incarnations) or len(m.decodes) != len(m.decodes_at):
        raise EntryMalformed("step plan: columns of unequal length")
    # SeqId is not called: it would cost as much as the rest.
    decodes: list[Decode] = list(map(Decode, plain.seq_ids, plain.incarnations))  # type: ignore[arg-type]
    for position, d in zip(m.decodes_at, m.decodes, strict=True):
        decodes.insert(position, Decode(SeqId(d.seq_id), d.incarnation, _decode_grant(d.HasField("grant"), d.grant)))
    return decodes


def decode_plan(m: pb.StepPlan) -> StepPlan:
    return StepPlan(
        plan_id=PlanId(m.plan_id),
        fence=Fence(m.fence),
        prefill_chunks=[_decode_chunk(c) for c in m.prefill_chunks],
        decodes=_decode_decodes(m),
        max_steps=m.max_steps,
        page_copies=[PageCopy(PageId(c.source_page), PageId(c.target_page), c.num_slots) for c in m.page_copies],
        kv_pulls=[_decode_pull(k) for k in m.kv_pulls],
        releases=[Release(SeqId(r.seq_id), r.incarnation) for r in m.releases],
        cancelled_pulls=[PullId(p) for p in m.cancelled_pulls],
        forgotten_pages=[PageId(p) for p in m.forgotten_pages],
        joins=m.joins,
    )


def _encode_progress(p: Progress) -> pb.Progress:
    return pb.Progress(
        seq_id=p.seq_id,
        incarnation=p.incarnation,
        num_computed=p.num_computed,
        tokens=p.tokens,
        logprobs=[
            pb.Logprobs(logprob=lp.logprob, top_ids=lp.top_ids, top_logprobs=lp.top_logprobs) for lp in p.logprobs or ()
        ],
        finish_reason=p.finish_reason or "",
        error=p.error or "",
    )


def _decode_progress(m: pb.Progress) -> Progress:
    logprobs = [TokenLogprobs(lp.logprob, list(lp.top_ids), list(lp.top_logprobs)) for lp in m.logprobs]
    try:
        reason = FinishReason(m.finish_reason) if m.finish_reason else None
    except ValueError as error:
        raise EntryMalformed(f"step report: unknown finish_reason {m.finish_reason!r}") from error
    return Progress(
        seq_id=SeqId(m.seq_id),
        incarnation=m.incarnation,
        num_computed=m.num_computed,
        tokens=list(m.tokens),
        logprobs=logprobs or None,
        finish_reason=reason,
        error=m.error or None,
    )


_TIMING = [f.name for f in fields(StepTiming)]


def encode_report(r: StepReport) -> pb.StepReport:
    timing = None
    if r.timing is not None:
        timing = pb.StepTiming(**{name: getattr(r.timing, name) for name in _TIMING})
    plain = [p for p in r.progress if _is_plain(p)]
    others = [] if len(plain) == len(r.progress) else [(i, p) for i, p in enumerate(r.progress) if not _is_plain(p)]
    return pb.StepReport(
        plan_id=r.plan_id,
        step=r.step,
        plan_done=r.plan_done,
        progress=[_encode_progress(p) for _, p in others],
        progress_at=[i for i, _ in others],
        plain=pb.PlainProgress(
            seq_ids=[p.seq_id for p in plain],
            incarnations=[p.incarnation for p in plain],
            num_computed=[p.num_computed for p in plain],
            tokens=[p.tokens[0] for p in plain],
        ),
        timing=timing,
        failure=r.failure or "",
    )


def _is_plain(p: Progress) -> bool:
    return len(p.tokens) == 1 and p.logprobs is None and p.finish_reason is None and p.error is None


def _decode_all_progress(m: pb.StepReport) -> list[Progress]:
    columns = m.plain.seq_ids, m.plain.incarnations, m.plain.num_computed, m.plain.tokens
    if len(set(map(len, columns))) > 1 or len(m.progress) != len(m.progress_at):
        raise EntryMalformed("step report: columns of unequal length")
    # SeqId is not called: it would cost as much as the rest.
    progress: list[Progress] = [
        Progress(seq_id, incarnation, num_computed, [token])  # type: ignore[arg-type]
        for seq_id, incarnation, num_computed, token in zip(*columns, strict=True)
    ]
    for position, other in zip(m.progress_at, m.progress, strict=True):
        progress.insert(position, _decode_progress(other))
    return progress


def decode_report(m: pb.StepReport) -> StepReport:
    return StepReport(
        plan_id=PlanId(m.plan_id),
        step=m.step,
        plan_done=m.plan_done,
        progress=_decode_all_progress(m),
        timing=StepTiming(**{name: getattr(m.timing, name) for name in _TIMING}) if m.HasField("timing") else None,
        failure=m.failure or None,
    )


def encode_hello(w: WorkerInfo) -> pb.Hello:
    card = w.model
    return pb.Hello(
        worker_id=w.worker_id,
        epoch=w.epoch,
        role=w.role,
        advertise_address=w.advertise_address,
        model=pb.ModelCard(
            name=card.name,
            revision=card.revision,
            architecture=card.architecture,
            vocab_size=card.vocab_size,
            max_model_len=card.max_model_len,
            eos_token_ids=card.eos_token_ids,
            kv_dtype=card.kv_dtype,
        ),
        num_pages=w.num_pages,
        page_size=w.page_size,
        unit_tokens=w.unit_tokens,
        unit_bytes=w.unit_bytes,
        host_id=w.host_id,
        min_prompt_tokens=w.min_prompt_tokens,
        max_prompt_tokens=w.max_prompt_tokens,
        shared_tier=None if w.shared_tier is None else _encode_shared_tier(w.shared_tier),
    )


def _encode_shared_tier(t: SharedTier) -> pb.SharedTier:
    return pb.SharedTier(layout=t.layout, max_units=t.max_units, ttl_ms=t.ttl_ms)


def decode_hello(m: pb.Hello) -> WorkerInfo:
    card = m.model
    return WorkerInfo(
        worker_id=WorkerId(m.worker_id),
        epoch=Epoch(m.epoch),
        role=_decode_role(m.role),
        advertise_address=m.advertise_address,
        model=ModelCard(
            name=card.name,
            revision=card.revision,
            architecture=card.architecture,
            vocab_size=card.vocab_size,
            max_model_len=card.max_model_len,
            eos_token_ids=tuple(card.eos_token_ids),
            kv_dtype=card.kv_dtype,
        ),
        num_pages=m.num_pages,
        page_size=m.page_size,
        unit_tokens=m.unit_tokens,
        unit_bytes=m.unit_bytes,
        host_id=m.host_id,
        min_prompt_tokens=m.min_prompt_tokens,
        max_prompt_tokens=m.max_prompt_tokens,
        shared_tier=_decode_shared_tier(m.shared_tier) if m.HasField("shared_tier") else None,
    )


def _decode_shared_tier(m: pb.SharedTier) -> SharedTier:
    if not m.layout:
        raise EntryMalformed("hello: shared_tier.layout is empty")
    return SharedTier(m.layout, m.max_units, m.ttl_ms)


def _decode_role(text: str) -> Role:
    try:
        return Role(text)
    except ValueError as error:
        raise EntryMalformed(f"hello: role {text!r}, not one of {', '.join(Role)}") from error


def encode_residents(pages: list[PageUnits], tiers: Iterable[TierUnits] = (), *, last: bool) -> pb.Residents:
    return pb.Residents(
        pages=[pb.PageUnits(page_id=p.page_id, unit_hashes=p.unit_hashes) for p in pages],
        last=last,
        tiers=[encode_tier_units(t) for t in tiers],
    )


def decode_residents(m: pb.Residents) -> Residents:
    pages = [PageUnits(PageId(p.page_id), [UnitHash(h) for h in p.unit_hashes]) for p in m.pages]
    return Residents(pages, [decode_tier_units(t) for t in m.tiers])


def encode_tier_units(t: TierUnits) -> pb.TierUnits:
    return pb.TierUnits(tier=t.tier, stored=t.stored, dropped=t.dropped)


def decode_tier_units(m: pb.TierUnits) -> TierUnits:
    if m.tier not in LOWER_TIERS:
        raise EntryMalformed(f"tier units: tier {m.tier!r}, not one of {', '.join(LOWER_TIERS)}")
    return TierUnits(Tier(m.tier), [UnitHash(h) for h in m.stored], [UnitHash(h) for h in m.dropped])


_PULL_REPORT = [f.name for f in fields(PullReport) if f.name not in ("pull_id", "failure")]


def encode_pull_report(r: PullReport) -> pb.PullReport:
    return pb.PullReport(
        pull_id=r.pull_id, failure=r.failure or "", **{name: getattr(r, name) for name in _PULL_REPORT}
    )


def decode_pull_report(m: pb.PullReport) -> PullReport:
    return PullReport(
        pull_id=PullId(m.pull_id), failure=m.failure or None, **{name: getattr(m, name) for name in _PULL_REPORT}
    )
