"""Paged attention by our own kernel, on CPUs: nothing gathered, and bitwise the same in any batch (src/attention.h)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import torch

from gpu_worker.kernels.library import COLUMNS, MAX_HEAD_DIM, SPLIT_TOKENS, AttentionPlan, Kernels
from gpu_worker.step_batch import StepBatch

TILE_QUERIES = 64
"""Queries of one sequence that go through its K and V together. The more, the less often keys are transposed; the
fewer, the better the threads' work is balanced."""


def obstacle(kernels: Kernels | None, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernel cannot serve a model, if it cannot."""
    if kernels is None:
        return "the CPU kernels are off or not built"
    if dtype != torch.float32:
        return f"computes in float32, not {dtype}"
    if head_dim % COLUMNS or head_dim > MAX_HEAD_DIM:
        return f"needs a head dimension that is a multiple of {COLUMNS}, at most {MAX_HEAD_DIM}, not {head_dim}"
    return None


@dataclass(frozen=True, slots=True)
class CpuStepAttention:
    kernels: Kernels
    plan: AttentionPlan

    def attend(
        self, queries: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *, window: int | None
    ) -> torch.Tensor:
        return self.kernels.attend(queries, (key_pages, value_pages), self.plan, window)


class CpuAttention:
    name = "cpu"
    page_multiple = 16
    default_page_size = 64

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def prepare(
        self, batch: StepBatch, *, page_size: int, windows: Set[int | None], dtype: torch.dtype, device: torch.device
    ) -> CpuStepAttention:
        return CpuStepAttention(self._kernels, attention_plan(batch))


def attention_plan(batch: StepBatch) -> AttentionPlan:
    """A step's queries in tiles of one sequence each, and what each tile sees in items that threads share out."""
    tiles: list[int] = []
    items: list[int] = []
    tables: list[int] = []
    row = num_tiles = num_partials = 0
    for query_len, context_len, table in zip(batch.query_lens, batch.context_lens, batch.block_tables, strict=True):
        for start in range(0, query_len, TILE_QUERIES):
            queries = min(TILE_QUERIES, query_len - start)
            position = context_len - query_len + start
            splits = (position + queries - 1) // SPLIT_TOKENS + 1
            for split in range(splits):
                items += (num_tiles, split)
            tiles += (row + start, queries, position, len(tables), num_partials)
            num_tiles += 1
            num_partials += splits * queries
        row += query_len
        tables += table
    return AttentionPlan(tiles, items, tables, num_partials)
