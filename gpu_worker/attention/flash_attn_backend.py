"""Paged attention by flash-attn (https://github.com/Dao-AILab/flash-attention), version 2, on CUDA.

A step of decodes only is one flash_attn_with_kvcache; any other is one flash_attn_varlen_func, whose causal
mask is bottom-right aligned, so chunks and decodes mix. The arguments are made by pure functions, which run
and are tested without the library.
"""

from __future__ import annotations

import importlib
from collections.abc import Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gpu_worker.step_batch import StepBatch


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """One step for flash-attn; all tensors int32."""

    decode_only: bool
    cu_seqlens_q: torch.Tensor  # [num_seqs + 1], first query row of each sequence, then the number of rows
    cu_seqlens_k: torch.Tensor  # [num_seqs + 1], the same over context lengths
    cache_seqlens: torch.Tensor  # [num_seqs], context lengths
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor  # [num_seqs, max pages of a sequence], short rows padded with page 0, never read


def flash_metadata(batch: StepBatch, device: torch.device) -> FlashMetadata:
    """A step's lists as flash-attn wants them."""
    max_pages = max(len(table) for table in batch.block_tables)
    padded_tables = [table + [0] * (max_pages - len(table)) for table in batch.block_tables]

    def int32(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    return FlashMetadata(
        decode_only=all(query_len == 1 for query_len in batch.query_lens),
        cu_seqlens_q=int32([0, *accumulate(batch.query_lens)]),
        cu_seqlens_k=int32([0, *accumulate(batch.context_lens)]),
        cache_seqlens=int32(batch.context_lens),
        max_seqlen_q=max(batch.query_lens),
        max_seqlen_k=max(batch.context_lens),
        block_table=int32(padded_tables),
    )


def window_size(window: int | None) -> tuple[int, int]:
    """(left, right) positions seen beside a query's own; -1 is flash-attn's "all". A window counts its own."""
    return (-1, -1) if window is None else (window - 1, 0)


def varlen_arguments(metadata: FlashMetadata, window: int | None, head_dim: int) -> dict[str, object]:
    """Keyword arguments of flash_attn_varlen_func beside q, k and v."""
    return {
        "cu_seqlens_q": metadata.cu_seqlens_q,
        "cu_seqlens_k": metadata.cu_seqlens_k,
        "max_seqlen_q": metadata.max_seqlen_q,
        "max_seqlen_k": metadata.max_seqlen_k,
        "block_table": metadata.block_table,
        "causal": True,
        "window_size": window_size(window),
        "softmax_scale": head_dim**-0.5,
    }


def decode_arguments(metadata: FlashMetadata, window: int | None, head_dim: int) -> dict[str, object]:
    """Keyword arguments of flash_attn_with_kvcache beside q and the caches; the step's KV is already written."""
    return {
        "cache_seqlens": metadata.cache_seqlens,
        "block_table": metadata.block_table,
        "causal": True,
        "window_size": window_size(window),
        "softmax_scale": head_dim**-0.5,
    }


@dataclass(frozen=True, slots=True)
class FlashStepAttention:
    metadata: FlashMetadata
    flash_attn: Any
    """The library."""

    def attend(
        self, queries: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *, window: int | None
    ) -> torch.Tensor:
        head_dim = queries.shape[-1]
        output: torch.Tensor
        if self.metadata.decode_only:
            # q: [num_seqs, 1, num_heads, head_dim]
            arguments = decode_arguments(self.metadata, window, head_dim)
            output = self.flash_attn.flash_attn_with_kvcache(queries[:, None], key_pages, value_pages, **arguments)
            return output[:, 0]
        arguments = varlen_arguments(self.metadata, window, head_dim)
        output = self.flash_attn.flash_attn_varlen_func(queries, key_pages, value_pages, **arguments)
        return output


class FlashAttention:
    """Raises ImportError when flash-attn is not installed."""

    name = "flash_attn"
    page_multiple = 256
    default_page_size = 256

    def __init__(self) -> None:
        self._flash_attn = importlib.import_module("flash_attn")

    def prepare(
        self, batch: StepBatch, *, page_size: int, windows: Set[int | None], dtype: torch.dtype, device: torch.device
    ) -> FlashStepAttention:
        return FlashStepAttention(flash_metadata(batch, device), self._flash_attn)
