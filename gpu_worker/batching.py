"""From a plan to the batches of its steps. Pure: no torch, no asyncio, no clock.

plan     releases ▸ page copies ▸ step 0             ▸ step 1                          ▸ … max_steps - 1
batch                             chunks + decodes     decodes + finished last chunks    the same

A plan that joins the one before it shares its step 0: chunks of both, and the decodes of the newer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.sequences import LiveSequence, SequenceTable
from gpu_worker.step_batch import StepBatch
from wire.errors import EntryMalformed
from wire.ids import SeqId
from wire.plan import Decode, ModelCard, PrefillChunk, Progress, StepPlan
from wire.sampling import FinishReason


@dataclass(slots=True)
class StepEntry:
    """One sequence's query in one step: its positions [start, end)."""

    sequence: LiveSequence
    start: int
    end: int
    is_prefill: bool
    fed_by: int | None = None
    """The query's one token is the i-th drawn in the step before, which the host has not read yet."""

    @property
    def samples(self) -> bool:
        """The query ends at the sequence's last token, so its last row gives the next one."""
        return self.fed_by is not None or self.end == len(self.sequence.token_ids)


class PlanRun:
    """One plan under way. Making it releases, starts and grants; first_step and next_step then say what to run.

    A sequence whose part of the plan cannot be carried out ends in an error, alone: see `refused`.
    """

    def __init__(self, plan: StepPlan, table: SequenceTable) -> None:
        self._table = table
        self.refused: list[Progress] = []
        """For the plan's first report."""
        for release in plan.releases:
            table.drop(release.seq_id, release.incarnation)
        self._chunks = [entry for chunk in plan.prefill_chunks if (entry := self._begin_chunk(chunk)) is not None]
        chunked = {entry.sequence.seq_id for entry in self._chunks}
        decodes = [s for decode in plan.decodes if (s := self._begin_decode(decode)) is not None]
        self._decodes = list({s.seq_id: s for s in decodes if s.seq_id not in chunked}.values())
        self._joining = [entry.sequence for entry in self._chunks if entry.samples]

    def first_step(self) -> list[StepEntry]:
        return self._decode_entries(self._decodes) + self.chunks()

    def chunks(self) -> list[StepEntry]:
        """Of the first step, those whose sequences were not released since."""
        return [entry for entry in self._chunks if self._is_live(entry.sequence)]

    def next_step(self) -> list[StepEntry]:
        """What a further step would run; empty when nothing is left to step."""
        return self._decode_entries(self._decodes + self._joining)

    def _decode_entries(self, sequences: list[LiveSequence]) -> list[StepEntry]:
        return [
            StepEntry(s, s.num_computed, s.num_computed + 1, is_prefill=False)
            for s in sequences
            if s.can_decode and self._is_live(s)
        ]

    def _is_live(self, sequence: LiveSequence) -> bool:
        return self._table.find(sequence.seq_id, sequence.incarnation) is sequence

    def _begin_chunk(self, chunk: PrefillChunk) -> StepEntry | None:
        try:
            if chunk.start is not None:
                self._table.start(chunk)
            sequence = self._table.find(chunk.seq_id, chunk.incarnation)
            if sequence is None:
                return None
            if chunk.grant is not None:
                self._table.grant(sequence, chunk.grant)
            self._table.check_chunk(sequence, chunk)
        except EntryMalformed as error:
            self._refuse(chunk.seq_id, chunk.incarnation, error)
            return None
        for child in chunk.children:
            sequence.choice = child.choice
        return StepEntry(sequence, chunk.start_pos, chunk.start_pos + chunk.num_tokens, is_prefill=True)

    def _begin_decode(self, decode: Decode) -> LiveSequence | None:
        sequence = self._table.find(decode.seq_id, decode.incarnation)
        if sequence is None or decode.grant is None:
            return sequence
        try:
            self._table.grant(sequence, decode.grant)
        except EntryMalformed as error:
            self._refuse(decode.seq_id, decode.incarnation, error)
            return None
        return sequence

    def _refuse(self, seq_id: SeqId, incarnation: int, error: EntryMalformed) -> None:
        sequence = self._table.drop(seq_id, incarnation)
        computed = 0 if sequence is None else sequence.num_computed
        self.refused.append(
            Progress(seq_id, incarnation, computed, [], finish_reason=FinishReason.ERROR, error=error.message)
        )


def step_ahead(entries: Sequence[StepEntry], card: ModelCard) -> list[StepEntry]:
    """The step after one that is under way, before its tokens are known; empty where the host must see them first.

    Every sequence that samples now goes on, but for those whose length or grant ends them for certain; one that draws
    a stop token will have been stepped for nothing. Nothing is stepped ahead of a draw that penalties shape.
    """
    ahead: list[StepEntry] = []
    for row, entry in enumerate(entry for entry in entries if entry.samples):
        sequence = entry.sequence
        if not sequence.goes_on_after(entry.end + 1, card):
            continue
        if sequence.draws_need_output:
            return []
        ahead.append(StepEntry(sequence, entry.end, entry.end + 1, is_prefill=False, fed_by=row))
    return ahead


def build_batch(entries: Sequence[StepEntry], page_size: int) -> StepBatch:
    """Flat lists for the model runner; logit_rows follow the order of the entries that sample."""
    batch = StepBatch()
    for entry in entries:
        table = entry.sequence.block_table
        positions = range(entry.start, entry.end)
        if entry.fed_by is None:
            batch.token_ids += entry.sequence.token_ids[entry.start : entry.end]
        else:
            batch.fed_rows.append((len(batch.token_ids), entry.fed_by))
            batch.token_ids.append(0)
        batch.positions += positions
        batch.slot_mapping += [table[p // page_size] * page_size + p % page_size for p in positions]
        batch.query_lens.append(len(positions))
        batch.context_lens.append(entry.end)
        batch.block_tables.append([*table[: -(-entry.end // page_size)]])
        if entry.samples:
            batch.logit_rows.append(len(batch.token_ids) - 1)
    return batch
