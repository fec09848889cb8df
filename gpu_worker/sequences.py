"""The sequences a worker is running, and what a plan may do to them. Pure: no torch, no clock.

One sequence, while it decodes (between steps len(token_ids) == num_computed + 1):

    positions  [0, num_computed) KV written | last token: next input | … granted_slots: the worker stops here
    token_ids  [0, num_prompt_tokens) prompt | [num_prompt_tokens, len) output
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvstore.prefix_hash import chain
from wire.errors import EntryMalformed
from wire.ids import UNIT_TOKENS, PageId, RequestId, SeqId, UnitHash
from wire.plan import ModelCard, PageGrant, PrefillChunk
from wire.sampling import FinishReason, SamplingParams


@dataclass(slots=True)
class LiveSequence:
    """One admission (incarnation) of one choice of a request."""

    seq_id: SeqId
    incarnation: int
    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    root_hash: UnitHash
    traceparent: str = ""
    choice: int = 0
    num_computed: int = 0
    """KV is written for positions [0, num_computed); the next query starts there."""
    block_table: list[PageId] = field(default_factory=list)
    granted_slots: int = 0
    unit_hashes: list[UnitHash] = field(default_factory=list)
    """Of the full units in [0, num_computed)."""
    finish_reason: FinishReason | None = None
    """Set once, when the sequence is over."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def output_counts(self) -> Counter[int]:
        """How often each token is in the output."""
        return Counter(self.token_ids[self.num_prompt_tokens :])

    @property
    def can_decode(self) -> bool:
        """Only the last token is uncomputed, and there is a slot for it."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_computed < self.granted_slots

    @property
    def draws_need_output(self) -> bool:
        """A draw depends on which tokens were drawn before it, beyond the KV they left."""
        p = self.sampling
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    def goes_on_after(self, num_tokens: int, card: ModelCard) -> bool:
        """It is stepped again once it has num_tokens tokens, should the last of them be no stop token."""
        if self.finish_reason is not None or num_tokens > self.granted_slots:
            return False
        return num_tokens - self.num_prompt_tokens < self.sampling.max_tokens and num_tokens < card.max_model_len

    def advance(self, num_computed: int) -> None:
        """KV for positions [0, num_computed) is now written: hash the units that became full."""
        self.num_computed = num_computed
        hashed = len(self.unit_hashes) * UNIT_TOKENS
        full = num_computed - num_computed % UNIT_TOKENS
        if full > hashed:
            parent = self.unit_hashes[-1] if self.unit_hashes else self.root_hash
            self.unit_hashes += chain(parent, self.token_ids[hashed:full])

    def stop_reason(self, card: ModelCard) -> FinishReason | None:
        """Why the sequence ends with its last token, an output token; None when it goes on."""
        token = self.token_ids[-1]
        if token in self.stop_ids(card):
            return FinishReason.STOP
        if self.num_output_tokens >= self.sampling.max_tokens or len(self.token_ids) >= card.max_model_len:
            return FinishReason.LENGTH
        return None

    def stop_ids(self, card: ModelCard) -> tuple[int, ...]:
        """Tokens that end the sequence."""
        eos = () if self.sampling.ignore_eos else card.eos_token_ids
        return (*eos, *self.sampling.stop_token_ids)


class SequenceTable:
    """Live sequences by id. A name that is unknown, or of another incarnation, is a late plan's: never an error.

    Methods that take what a plan says about one sequence raise EntryMalformed when it cannot be carried out.
    """

    def __init__(
        self,
        card: ModelCard,
        *,
        num_pages: int,
        page_size: int,
        on_drop: Callable[[LiveSequence], None] = lambda sequence: None,
        on_grant: Callable[[LiveSequence, int, list[PageId]], None] = lambda sequence, first_index, pages: None,
    ) -> None:
        """on_grant: told of pages that are new in a sequence's block table, from first_index on."""
        self._card = card
        self._num_pages = num_pages
        self._page_size = page_size
        self._on_drop = on_drop
        self._on_grant = on_grant
        self._live: dict[SeqId, LiveSequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._live.values())

    def find(self, seq_id: SeqId, incarnation: int) -> LiveSequence | None:
        sequence = self._live.get(seq_id)
        return sequence if sequence is not None and sequence.incarnation == incarnation else None

    def drop(self, seq_id: SeqId, incarnation: int) -> LiveSequence | None:
        """Forget a sequence: finished, released or failed. Its pages are the scheduler's to reuse."""
        sequence = self.find(seq_id, incarnation)
        if sequence is not None:
            del self._live[seq_id]
            self._on_drop(sequence)
        return sequence

    def clear(self) -> None:
        for sequence in list(self):
            self.drop(sequence.seq_id, sequence.incarnation)

    def start(self, chunk: PrefillChunk) -> None:
        """Begin the incarnation that `chunk.start` describes; an older one of the same sequence is dropped.

        Positions [0, chunk.start_pos) are prefix-cache hits: their KV already lies in the granted pages.
        """
        start = chunk.start
        assert start is not None
        older = self._live.get(chunk.seq_id)
        if older is not None:
            if older.incarnation >= chunk.incarnation:
                return  # a repeated start, or a late plan's
            self.drop(older.seq_id, older.incarnation)
        self._live[chunk.seq_id] = sequence = LiveSequence(
            seq_id=chunk.seq_id,
            incarnation=chunk.incarnation,
            request_id=start.request_id,
            token_ids=list(start.token_ids),
            num_prompt_tokens=start.num_prompt_tokens,
            sampling=start.sampling,
            root_hash=start.root_hash,
            traceparent=start.traceparent,
        )
        self._check_tokens(sequence)
        if chunk.start_pos < len(sequence.token_ids):
            sequence.advance(chunk.start_pos)

    def _check_tokens(self, sequence: LiveSequence) -> None:
        tokens = sequence.token_ids
        if not 1 <= sequence.num_prompt_tokens <= len(tokens) or len(tokens) >= self._card.max_model_len:
            raise EntryMalformed(
                f"token_ids: {sequence.num_prompt_tokens} prompt of {len(tokens)} tokens, "
                f"max_model_len {self._card.max_model_len}"
            )
        highest = max(tokens + [token for token, _ in sequence.sampling.logit_bias])
        if highest >= self._card.vocab_size:
            raise EntryMalformed(f"token {highest} is outside the vocabulary of {self._card.vocab_size}")

    def grant(self, sequence: LiveSequence, grant: PageGrant) -> None:
        """Place granted pages and set the slot limit; repeating a grant changes nothing."""
        table = sequence.block_table
        if grant.first_index > len(table):
            raise EntryMalformed(f"grant: first_index {grant.first_index} leaves a gap after {len(table)} pages")
        if any(page >= self._num_pages for page in grant.page_ids):
            raise EntryMalformed(f"grant: page {max(grant.page_ids)} of a pool of {self._num_pages}")
        known = table[grant.first_index :]
        common = next((i for i, (a, b) in enumerate(zip(known, grant.page_ids, strict=False)) if a != b), len(known))
        table[grant.first_index : grant.first_index + len(grant.page_ids)] = grant.page_ids
        if grant.granted_slots > len(table) * self._page_size:
            raise EntryMalformed(
                f"grant: granted_slots {grant.granted_slots} over {len(table)} pages of {self._page_size}"
            )
        sequence.granted_slots = grant.granted_slots
        if common < len(grant.page_ids):
            self._on_grant(sequence, grant.first_index + common, grant.page_ids[common:])

    def check_chunk(self, sequence: LiveSequence, chunk: PrefillChunk) -> None:
        """A chunk continues its sequence exactly, inside its tokens and its grant."""
        end = chunk.start_pos + chunk.num_tokens
        limit = min(len(sequence.token_ids), sequence.granted_slots)
        if chunk.start_pos != sequence.num_computed or not chunk.start_pos < end <= limit:
            raise EntryMalformed(
                f"chunk [{chunk.start_pos}, {end}): {sequence.num_computed} computed of "
                f"{len(sequence.token_ids)} tokens, {sequence.granted_slots} slots granted"
            )
        if any(child.seq_id != sequence.seq_id for child in chunk.children) or len(chunk.children) > 1:
            raise EntryMalformed("children: a chunk samples its own sequence only")
