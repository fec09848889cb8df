"""Paged attention in plain torch, on any device and over any KV format: the reference, and what runs where ours cannot.

Sequences of equal query length and similar context are padded into one group and go through one
scaled_dot_product_attention, so a step of decodes costs a few calls a layer, not one per sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_worker.kv_format import KVFormat
from gpu_worker.step_batch import StepBatch
from gpu_worker.upload import upload

GROUP_CONTEXT_TOKENS = 4096
"""Context gathered at once, unless one sequence has more: beyond this it no longer stays in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Sequences with the same number of queries, their contexts padded to `padded_len` = pages * page_size."""

    rows: torch.Tensor  # int64 [num_seqs * query_len], where the group's queries lie in the step
    page_ids: torch.Tensor  # int64 [num_seqs * pages], block tables one after the other
    masks: Mapping[int | None, torch.Tensor]  # by window: 0 or -inf, [num_seqs, 1, query_len, padded_len]


@dataclass(frozen=True, slots=True)
class TorchStepAttention:
    groups: tuple[QueryGroup, ...]
    kv_format: KVFormat | None = None
    """None: the pages hold plain rows."""

    def attend(
        self, queries: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *, window: int | None
    ) -> torch.Tensor:
        output = torch.empty_like(queries)
        for group in self.groups:
            mask = group.masks[window]
            num_seqs, _, query_len, padded_len = mask.shape
            grouped = queries.index_select(0, group.rows).view(num_seqs, query_len, *queries.shape[1:])
            keys, values = (
                self._read(pages.index_select(0, group.page_ids).view(num_seqs, padded_len, *pages.shape[2:]))
                for pages in (key_pages, value_pages)
            )
            attended = scaled_dot_product_attention(
                grouped.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, enable_gqa=True
            )
            output.index_copy_(0, group.rows, attended.transpose(1, 2).flatten(0, 1))
        return output

    def _read(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.kv_format is None else self.kv_format.decode(stored)


class TorchAttention:
    name = "torch"
    page_multiple = 16
    default_page_size = 64

    def __init__(self, kv_format: KVFormat | None = None) -> None:
        self._kv_format = kv_format

    def prepare(
        self, batch: StepBatch, *, page_size: int, windows: Set[int | None], dtype: torch.dtype, device: torch.device
    ) -> TorchStepAttention:
        first_rows: list[int] = []
        num_rows = 0
        for query_len in batch.query_lens:
            first_rows.append(num_rows)
            num_rows += query_len
        groups = tuple(
            _group(batch, members, first_rows, page_size=page_size, windows=windows, dtype=dtype, device=device)
            for members in _similar_sequences(batch)
        )
        return TorchStepAttention(groups, self._kv_format)

    def decode_step(
        self,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        page_size: int,
        windows: Set[int | None],
        dtype: torch.dtype,
    ) -> TorchStepAttention:
        num_seqs, width = block_table.shape
        positions = (context_lens - 1)[:, None]
        group = QueryGroup(
            rows=torch.arange(num_seqs, device=block_table.device),
            page_ids=block_table.flatten(),
            masks={window: _mask(positions, width * page_size, window).to(dtype) for window in windows},
        )
        return TorchStepAttention((group,), self._kv_format)


def _similar_sequences(batch: StepBatch) -> list[list[int]]:
    """Indices of sequences with equal query length, whose contexts differ by less than a factor of two."""
    similar: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        similar[query_len, context_len.bit_length()].append(index)
    groups: list[list[int]] = []
    for (_, context_bits), members in similar.items():
        group_size = max(1, GROUP_CONTEXT_TOKENS >> context_bits)
        groups.extend(members[i : i + group_size] for i in range(0, len(members), group_size))
    return groups


def _group(
    batch: StepBatch,
    members: list[int],
    first_rows: list[int],
    *,
    page_size: int,
    windows: Set[int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> QueryGroup:
    query_len = batch.query_lens[members[0]]
    pages = -(-max(batch.context_lens[i] for i in members) // page_size)
    # A short table is padded with its own first page; the mask hides what lies there.
    tables = [batch.block_tables[i][:pages] for i in members]
    page_ids = [page for table in tables for page in table + table[:1] * (pages - len(table))]
    rows = [row for i in members for row in range(first_rows[i], first_rows[i] + query_len)]
    # query j of a sequence stands at position context_len - query_len + j
    starts = upload([batch.context_lens[i] - query_len for i in members], torch.int64, device)
    query_positions = starts[:, None] + torch.arange(query_len, device=device)
    return QueryGroup(
        rows=upload(rows, torch.int64, device),
        page_ids=upload(page_ids, torch.int64, device),
        masks={window: _mask(query_positions, pages * page_size, window).to(dtype) for window in windows},
    )


def _mask(query_positions: torch.Tensor, padded_len: int, window: int | None) -> torch.Tensor:
    """query_positions [num_seqs, query_len] → float [num_seqs, 1, query_len, padded_len], 0 seen, -inf hidden."""
    distance = query_positions[:, None, :, None] - torch.arange(padded_len, device=query_positions.device)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)
