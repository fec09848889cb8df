"""A worker without tensors that still cannot be fooled: every KV slot holds a digest of the whole prefix it stands for.

Each step checks that the block table really leads to the KV of the sequence's own tokens: a page shared, copied,
evicted or freed at the wrong moment shows up as a wrong digest, a position past a grant as an assertion.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from kvstore.prefix_hash import chain
from scheduler.events import PullReported, StepReported, TierChanged
from scheduler.policy.step_time import StepWork
from tests.engine.paged_tiers import PagedRedis, PagedTiers
from wire.ids import UNIT_TOKENS, Epoch, PageId, PullId, SeqId, UnitHash, WorkerId
from wire.plan import (
    KvPull,
    ModelCard,
    PageGrant,
    PageUnits,
    PrefillChunk,
    Progress,
    PullReport,
    Role,
    SequenceStart,
    StepPlan,
    StepReport,
    StepTiming,
    TierUnits,
    WorkerInfo,
)
from wire.sampling import FinishReason, SamplingParams

EOS = 1
VOCAB = 50
CARD = ModelCard("model", "r0", "LlamaForCausalLM", VOCAB, 400, (EOS,), "float32")


def digest_after(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 7) % (1 << 61)


def next_token(digest: int, seed: int) -> int:
    """The "model": a token that depends on the whole prefix; EOS about once in 25."""
    return (digest * 31 + seed * 97) % 1009 % VOCAB


def expected_output(prompt: list[int], sampling: SamplingParams, max_model_len: int = CARD.max_model_len) -> list[int]:
    """What any correct schedule must emit."""
    digest, output = 0, list[int]()
    for token in prompt:
        digest = digest_after(digest, token)
    while len(output) < sampling.max_tokens:
        token = next_token(digest, sampling.seed)
        output.append(token)
        if token == EOS and not sampling.ignore_eos:
            break
        digest = digest_after(digest, token)
    return output


@dataclass
class _Sequence:
    incarnation: int
    start: SequenceStart
    tokens: list[int]
    digests: list[int]  # digests[i] stands for tokens[: i + 1]
    num_computed: int
    pages: list[PageId] = field(default_factory=list)
    granted_slots: int = 0
    decoding: bool = False


class PagedWorker:
    """Runs plans exactly as design §4 says; the test decides when a step runs and when its report arrives."""

    def __init__(
        self,
        worker_id: str,
        num_pages: int,
        page_size: int,
        step_budget: int,
        epoch: int = 1,
        step_us: Callable[[StepWork], float] = lambda work: 1000.0,
        role: Role = Role.BOTH,
        peers: Mapping[WorkerId, PagedWorker] | None = None,
        tier_units: int = 0,
        redis: PagedRedis | None = None,
        prompt_range: tuple[int, int] = (0, 0),
    ) -> None:
        """step_us: how long a step of so much work takes, as reported; no time passes. peers: whom it can pull from.
        tier_units: what its host tier holds at most. redis: what takes what that evicts."""
        self.info = WorkerInfo(
            WorkerId(worker_id),
            Epoch(epoch),
            role,
            "127.0.0.1:1",
            CARD,
            num_pages,
            page_size,
            UNIT_TOKENS,
            unit_bytes=0 if peers is None else 1000,
            min_prompt_tokens=prompt_range[0],
            max_prompt_tokens=prompt_range[1],
            shared_tier=None if redis is None else redis.shared_tier,
        )
        self._peers = {} if peers is None else peers
        self.pulls: dict[PullId, KvPull] = {}
        """Under way: finish_pull ends one."""
        self.cancelled_pulls: set[PullId] = set()
        self._tiers = PagedTiers(tier_units, redis)
        self.step_budget = step_budget
        self.step_us = step_us
        self.steps: list[tuple[StepWork, float]] = []
        """What every step ran, and how long it took."""
        self.plans: deque[StepPlan] = deque()
        self.reports: deque[StepReport | PullReport | TierUnits] = deque()
        self._sequences: dict[SeqId, _Sequence] = {}
        self._slots: dict[PageId, list[int | None]] = {PageId(p): [None] * page_size for p in range(num_pages)}
        self._units: dict[PageId, list[UnitHash]] = {PageId(p): [] for p in range(num_pages)}
        self._current: StepPlan | None = None
        self._joined: list[StepPlan] = []
        self._step = 0
        self._work_done = StepWork(0)

    @property
    def is_idle(self) -> bool:
        return self._current is None and not self.plans and not self.pulls

    def residents(self) -> list[PageUnits]:
        return [PageUnits(page, list(units)) for page, units in self._units.items() if units]

    def tiers(self) -> list[TierUnits]:
        return self._tiers.contents()

    def event(self, report: StepReport | PullReport | TierUnits) -> StepReported | PullReported | TierChanged:
        """As the engine is told."""
        worker_id, epoch = self.info.worker_id, self.info.epoch
        match report:
            case StepReport():
                return StepReported(worker_id, epoch, report)
            case PullReport():
                return PullReported(worker_id, epoch, report)
            case TierUnits():
                return TierChanged(worker_id, epoch, report)
            case _:
                assert_never(report)

    def reconnect(self) -> None:
        """The session broke: plans, pulls and sequences go, computed units stay."""
        self.pulls.clear()
        self.cancelled_pulls.clear()
        self.plans.clear()
        self.reports.clear()
        self._sequences.clear()
        self._current, self._step, self._joined = None, 0, []

    def run_step(self) -> None:
        """Run one step of the oldest plan and those that join it, or its releases alone, and queue the reports."""
        self.reports.extend(self._tiers.changes())
        if self._current is None:
            if not self.plans:
                return
            self._current, self._step, self._joined = self.plans.popleft(), 0, []
            self._begin(self._current)
            while self.plans and self.plans[0].joins:
                chunked = {chunk.seq_id for plan in (*self._joined, self._current) for chunk in plan.prefill_chunks}
                released = {release.seq_id for release in self.plans[0].releases}
                assert chunked.isdisjoint(released), "a chunk that others count on would be dropped"
                self._joined.append(self._current)
                self._current = self.plans.popleft()
                self._begin(self._current)
        plan = self._current
        if plan.max_steps == 0:
            self._current = None
            self.reports.append(StepReport(plan.plan_id, 0, True, []))
            return
        progress = self._run(plan, first=self._step == 0)
        for joined in self._joined:
            self.reports.append(StepReport(joined.plan_id, 0, True, []))
        self._joined = []
        done = self._step + 1 >= plan.max_steps or bool(self.plans) or not self._can_repeat(plan)
        self.reports.append(StepReport(plan.plan_id, self._step, done, progress, self._timing(progress)))
        self._step += 1
        if done:
            self._current = None

    def _begin(self, plan: StepPlan) -> None:
        for release in plan.releases:
            known = self._sequences.get(release.seq_id)
            if known is not None and known.incarnation == release.incarnation:
                del self._sequences[release.seq_id]
        for page in plan.forgotten_pages:
            self._void(page)
        for copy in plan.page_copies:
            source = self._slots[copy.source_page]
            self._void(copy.target_page)
            self._slots[copy.target_page][: copy.num_slots] = source[: copy.num_slots]
            self._units[copy.target_page] = self._units[copy.source_page][: copy.num_slots // UNIT_TOKENS]
        self.cancelled_pulls |= set(plan.cancelled_pulls) & self.pulls.keys()
        for pull in plan.kv_pulls:
            assert len(pull.unit_hashes) <= len(pull.target_pages) * self.info.page_size // UNIT_TOKENS
            for page in pull.target_pages:
                self._void(page)
            self.pulls[pull.pull_id] = pull
        for chunk in plan.prefill_chunks:
            self._start(chunk)
        for decode in plan.decodes:
            seq = self._known(decode.seq_id, decode.incarnation)
            if seq is not None and decode.grant is not None:
                self._take_grant(seq, decode.grant)

    def finish_pull(self, pull_id: PullId, most_units: int | None = None) -> None:
        """End a pull: it brings all units that its source has now, or so many at most; what it does not bring it may
        have left in any state."""
        pull = self.pulls.pop(pull_id)
        found: list[list[int | None]] = []
        source = self._peers.get(pull.source_worker_id)
        is_cancelled = pull_id in self.cancelled_pulls
        self.cancelled_pulls.discard(pull_id)
        if source is not None and source.info.epoch == pull.source_epoch and not is_cancelled:
            for unit_hash in pull.unit_hashes[:most_units]:
                unit = source.unit(unit_hash) if source is not self else self._tiers.get(unit_hash)
                if unit is None:
                    break
                found.append(unit)
        per_page = self.info.page_size // UNIT_TOKENS
        for index, unit_hash in enumerate(pull.unit_hashes):
            page, first = pull.target_pages[index // per_page], index % per_page * UNIT_TOKENS
            garbage: list[int | None] = [-1] * UNIT_TOKENS
            self._slots[page][first : first + UNIT_TOKENS] = found[index] if index < len(found) else garbage
            if index < len(found):
                self._units[page].append(unit_hash)
        failure = None if len(found) == len(pull.unit_hashes) else "test"
        self.reports.append(PullReport(pull_id, True, len(found), failure, "shm"))

    def renew_pull(self, pull_id: PullId) -> None:
        self.reports.append(PullReport(pull_id, False))

    def unit(self, unit_hash: UnitHash) -> list[int | None] | None:
        """What a pull finds here: in a page, or below."""
        for page, units in self._units.items():
            if unit_hash in units:
                first = units.index(unit_hash) * UNIT_TOKENS
                return self._slots[page][first : first + UNIT_TOKENS]
        return self._tiers.get(unit_hash)

    def _void(self, page: PageId, keep_units: int = 0) -> None:
        """The page gets a new owner: what it held goes below."""
        gone = enumerate(self._units[page][keep_units:], start=keep_units)
        slots = self._slots[page]
        self._tiers.save({unit: slots[i * UNIT_TOKENS : (i + 1) * UNIT_TOKENS] for i, unit in gone})
        self._units[page] = self._units[page][:keep_units]
        self.reports.extend(self._tiers.changes())

    def _run(self, plan: StepPlan, *, first: bool) -> list[Progress]:
        ran: list[tuple[_Sequence, SeqId, int, int]] = []
        self._work_done = StepWork(0)
        for seq_id, count, samples in self._work(plan, first):
            seq = self._sequences[seq_id]
            self._write(seq, seq.num_computed, count)
            if seq.decoding:
                self._work_done.tokens += 1
                self._work_done.decode_context += seq.num_computed + 1
            else:
                self._work_done.add_chunk(seq.num_computed, count)
            seq.num_computed += count
            ran.append((seq, seq_id, count, samples))
        assert sum(count for *_, count, _ in ran) <= self.step_budget, "step over budget"
        return [self._finish_step(seq, seq_id, bool(samples)) for seq, seq_id, _, samples in ran]

    def _timing(self, progress: list[Progress]) -> StepTiming:
        work = self._work_done
        step_us = self.step_us(work)
        self.steps.append((work, step_us))
        num_decodes = work.tokens - work.chunk_tokens
        context = sum(p.num_computed for p in progress)
        return StepTiming(0, 0, int(step_us), 0, work.chunk_tokens, num_decodes, context)

    def _work(self, plan: StepPlan, first: bool) -> list[tuple[SeqId, int, int]]:
        """(sequence, tokens, whether it samples) of one step: chunks of the plans that were joined come first."""
        chunks = [chunk for joined in self._joined for chunk in joined.prefill_chunks]
        work: list[tuple[SeqId, int, int]] = []
        if first:
            work += [entry for chunk in chunks if (entry := self._chunk_work(chunk)) is not None]
        for decode in plan.decodes:
            seq = self._known(decode.seq_id, decode.incarnation)
            if seq is not None and seq.decoding and seq.num_computed < seq.granted_slots:
                work.append((decode.seq_id, 1, 1))
        for chunk in plan.prefill_chunks:
            if first:
                if (entry := self._chunk_work(chunk)) is not None:
                    work.append(entry)
            else:
                seq = self._known(chunk.seq_id, chunk.incarnation)
                if seq is not None and seq.decoding and seq.num_computed < seq.granted_slots:
                    work.append((chunk.seq_id, 1, 1))
        return work

    def _start(self, chunk: PrefillChunk) -> None:
        if chunk.start is not None:
            tokens = list(chunk.start.token_ids)
            fresh = _Sequence(chunk.incarnation, chunk.start, tokens, [], chunk.start_pos)
            digest = 0
            for token in tokens:
                digest = digest_after(digest, token)
                fresh.digests.append(digest)
            self._sequences[chunk.seq_id] = fresh
        seq = self._known(chunk.seq_id, chunk.incarnation)
        if seq is not None and chunk.grant is not None:
            self._take_grant(seq, chunk.grant)

    def _chunk_work(self, chunk: PrefillChunk) -> tuple[SeqId, int, int] | None:
        seq = self._known(chunk.seq_id, chunk.incarnation)
        if seq is None:
            return None
        assert chunk.start_pos == seq.num_computed, "a chunk must start where the last one ended"
        ends = chunk.start_pos + chunk.num_tokens == len(seq.tokens)
        assert bool(chunk.children) == ends
        return chunk.seq_id, chunk.num_tokens, int(ends)

    def _can_repeat(self, plan: StepPlan) -> bool:
        members = [(d.seq_id, d.incarnation) for d in plan.decodes]
        members += [(c.seq_id, c.incarnation) for c in plan.prefill_chunks]
        known = [seq for m in members if (seq := self._known(*m)) is not None]
        return any(seq.decoding and seq.num_computed < seq.granted_slots for seq in known)

    def _known(self, seq_id: SeqId, incarnation: int) -> _Sequence | None:
        seq = self._sequences.get(seq_id)
        return seq if seq is not None and seq.incarnation == incarnation else None

    def _take_grant(self, seq: _Sequence, grant: PageGrant) -> None:
        size = self.info.page_size
        for index, page in enumerate(grant.page_ids, start=grant.first_index):
            if (index + 1) * size > seq.num_computed and page not in seq.pages:
                self._void(page, keep_units=max(0, seq.num_computed - index * size) // UNIT_TOKENS)
        seq.pages[grant.first_index : grant.first_index + len(grant.page_ids)] = grant.page_ids
        seq.granted_slots = grant.granted_slots

    def _write(self, seq: _Sequence, start: int, count: int) -> None:
        size = self.info.page_size
        assert start + count <= seq.granted_slots, "ran past its grant"
        for position in range(start, start + count):
            page, slot = seq.pages[position // size], position % size
            assert len(self._units[page]) * UNIT_TOKENS <= slot, "wrote into a published unit"
            self._slots[page][slot] = seq.digests[position]
        for position in range(start + count):
            held = self._slots[seq.pages[position // size]][position % size]
            assert held == seq.digests[position], f"position {position} reads another sequence's KV"

    def _finish_step(self, seq: _Sequence, seq_id: SeqId, samples: bool) -> Progress:
        self._note_units(seq)
        if not samples:
            return Progress(seq_id, seq.incarnation, seq.num_computed, [])
        sampling = seq.start.sampling
        token = next_token(seq.digests[-1], sampling.seed)
        seq.tokens.append(token)
        seq.digests.append(digest_after(seq.digests[-1], token))
        seq.decoding = True
        reason = None
        if token == EOS and not sampling.ignore_eos:
            reason = FinishReason.STOP
        elif len(seq.tokens) - seq.start.num_prompt_tokens >= sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self._sequences[seq_id]
        return Progress(seq_id, seq.incarnation, seq.num_computed, [token], None, reason)

    def _note_units(self, seq: _Sequence) -> None:
        per_page = self.info.page_size // UNIT_TOKENS
        hashes = chain(seq.start.root_hash, seq.tokens[: seq.num_computed])
        for index, unit_hash in enumerate(hashes):
            units = self._units[seq.pages[index // per_page]]
            if len(units) == index % per_page:
                units.append(unit_hash)
