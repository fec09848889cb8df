"""KV pages of a worker without a model: two bytes a slot that depend on the sequence's whole prefix, as KV does.

    digest(p) = digest(p - 1) + (token(p) + 1) · weight(p)  mod 2^16     K: its low byte, V: its high one, in each layer

digest(p - 1) is read from the page it should lie in. So a page reused, copied or pulled wrongly shows: `first_wrong`
compares every slot with what the tokens alone give. They are real pages, which transfers and tiers move as a model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvFormat
from gpu_worker.transfer.shared_pool import SharedPool
from wire.ids import UNIT_TOKENS
from wire.plan import PageCopy

NUM_LAYERS = 2
_MASK = 0xFFFF


class SimulatedKv:
    """Pages [0, num_pages) of page_size slots; max_positions: the longest sequence."""

    def __init__(self, kv_dtype: str, *, num_pages: int, page_size: int, max_positions: int) -> None:
        self._page_size = page_size
        kv_format = KvFormat(kv_dtype, NUM_LAYERS, 1, 1, element_bytes=1, unit_tokens=UNIT_TOKENS)
        self.pages = HostPages(kv_format, page_size, SharedPool(num_pages, NUM_LAYERS * num_pages * page_size))
        self._low, self._high = (half.reshape(NUM_LAYERS, -1) for half in self.pages.halves)  # [layers, slots]
        # Odd, and different at positions that are near each other: tokens that change places change the digest.
        self._weights = (np.arange(max_positions, dtype=np.int64) * 40_503 * 2 + 1) & _MASK

    def write(self, batch: StepBatch) -> None:
        """Write the slots of every token of the batch, each after its prefix as it lies in the pages."""
        slots = np.array(batch.slot_mapping, dtype=np.int64)
        increments = self._increments(batch.token_ids, np.array(batch.positions, dtype=np.int64))
        lengths = np.array(batch.query_lens, dtype=np.int64)
        ends = np.cumsum(lengths)
        sums = np.cumsum(increments)
        # Sums run through the whole batch: less what came before the sequence's first token, plus its own past.
        first_rows = ends - lengths
        before_query = sums[first_rows] - increments[first_rows]
        before: NDArray[np.int64] | None = None
        # A model writes the KV of all tokens, layer by layer, before any attends: one chunk may stand on another one of
        # the same batch. Here that takes a pass for each link of the chain, and one to see that nothing changes.
        while before is None or (self._digests_before(batch) != before).any():
            before = self._digests_before(batch)
            digests = sums + np.repeat(before - before_query, lengths)
            self._low[:, slots] = digests & 0xFF
            self._high[:, slots] = digests >> 8 & 0xFF

    def first_wrong(self, sequence: LiveSequence) -> int | None:
        """The first position whose slots are not those of the sequence's own tokens, in all layers; None: all are."""
        positions = np.arange(len(sequence.token_ids), dtype=np.int64)
        table = np.array(sequence.block_table, dtype=np.int64)
        slots = table[positions // self._page_size] * self._page_size + positions % self._page_size
        expected = np.cumsum(self._increments(sequence.token_ids, positions)) & _MASK
        found = self._low[:, slots].astype(np.int64) | self._high[:, slots].astype(np.int64) << 8
        wrong = np.flatnonzero((found != expected).any(axis=0))
        return int(wrong[0]) if len(wrong) else None

    def copy(self, copies: Sequence[PageCopy]) -> None:
        for copy in copies:
            source, target = copy.source_page * self._page_size, copy.target_page * self._page_size
            for half in (self._low, self._high):
                half[:, target : target + copy.num_slots] = half[:, source : source + copy.num_slots]

    def _increments(self, token_ids: Sequence[int], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return (np.array(token_ids, dtype=np.int64) + 1) * self._weights[positions] & _MASK

    def _digests_before(self, batch: StepBatch) -> NDArray[np.int64]:
        """The digest that each sequence's query continues: [num_seqs]."""
        starts = [context - query for context, query in zip(batch.context_lens, batch.query_lens, strict=True)]
        size = self._page_size
        slots = [
            table[(start - 1) // size] * size + (start - 1) % size if start else 0
            for start, table in zip(starts, batch.block_tables, strict=True)
        ]
        digests = self._low[0, slots].astype(np.int64) | self._high[0, slots].astype(np.int64) << 8
        return np.where(np.array(starts) > 0, digests, 0)
