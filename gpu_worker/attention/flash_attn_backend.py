"""Paged attention by flash-attn (https://github.com/Dao-AILab/flash-attention), version 2, on CUDA.

A step of decodes only is one flash_attn_with_kvcache, which splits a context over the GPU when the batch alone does
not fill it; any other is one flash_attn_varlen_func, whose causal mask is bottom-right aligned, so chunks and decodes
mix. The arguments are made by pure functions, which run and are tested without the library. Read against version
2.8's Python interface and its checks in csrc/flash_attn/flash_api.cpp.
"""

from __future__ import annotations

import importlib
from collections.abc import Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from gpu_worker.step_batch import StepBatch
from gpu_worker.upload import upload

_DTYPES = (torch.float16, torch.bfloat16)
_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
"""Any other head dimension is padded by the library: K and V too, which here is the whole cache, at every call."""
_MIN_CAPABILITY = (8, 0)


def obstacle(
    device: torch.device, dtype: torch.dtype, head_dim: int, capability: tuple[int, int] | None = None
) -> str | None:
    """Why flash-attn cannot serve a model, if it cannot.

    capability: the GPU's compute capability; None when it is not known, which the library then judges itself.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if capability is not None and capability < _MIN_CAPABILITY:
        return f"needs compute capability 8.0 (Ampere) or above, not {capability[0]}.{capability[1]}"
    if dtype not in _DTYPES:
        return f"computes in float16 and bfloat16, not {dtype}"
    if head_dim > _MAX_HEAD_DIM or head_dim % _HEAD_DIM_MULTIPLE:
        return f"needs a head dimension that is a multiple of 8, at most {_MAX_HEAD_DIM}, not {head_dim}"
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:
        return f"the flash_attn package cannot be imported ({error})"
    return None


@dataclass(frozen=True, slots=True)
class VarlenMetadata:
    """A mixed step for flash_attn_varlen_func; all tensors int32."""

    cu_seqlens_q: torch.Tensor  # [num_seqs + 1], first query row of each sequence, then the number of rows
    cu_seqlens_k: torch.Tensor  # [num_seqs + 1], the same over context lengths
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor  # [num_seqs, max pages of a sequence], short rows padded with page 0, never read


@dataclass(frozen=True, slots=True)
class DecodeMetadata:
    """A step of decodes for flash_attn_with_kvcache; all tensors int32, read by the device only."""

    cache_seqlens: torch.Tensor  # [num_seqs], context lengths
    block_table: torch.Tensor  # [num_seqs, width], as above


def decode_only(batch: StepBatch) -> bool:
    return all(query_len == 1 for query_len in batch.query_lens)


def varlen_metadata(batch: StepBatch, device: torch.device) -> VarlenMetadata:
    """A mixed step's lists as flash-attn wants them."""
    return VarlenMetadata(
        cu_seqlens_q=upload([0, *accumulate(batch.query_lens)], torch.int32, device),
        cu_seqlens_k=upload([0, *accumulate(batch.context_lens)], torch.int32, device),
        max_seqlen_q=max(batch.query_lens),
        max_seqlen_k=max(batch.context_lens),
        block_table=_block_table(batch, device),
    )


def decode_metadata(batch: StepBatch, device: torch.device) -> DecodeMetadata:
    """The lists of a step of decodes as flash-attn wants them."""
    return DecodeMetadata(upload(batch.context_lens, torch.int32, device), _block_table(batch, device))


def _block_table(batch: StepBatch, device: torch.device) -> torch.Tensor:
    max_pages = max(len(table) for table in batch.block_tables)
    return upload([table + [0] * (max_pages - len(table)) for table in batch.block_tables], torch.int32, device)


def window_size(window: int | None) -> tuple[int, int]:
    """(left, right) positions seen beside a query's own; -1 is flash-attn's "all". A window counts its own."""
    return (-1, -1) if window is None else (window - 1, 0)


def varlen_arguments(metadata: VarlenMetadata, window: int | None, head_dim: int) -> dict[str, object]:
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


def decode_arguments(metadata: DecodeMetadata, window: int | None, head_dim: int) -> dict[str, object]:
    """Keyword arguments of flash_attn_with_kvcache beside q and the caches; the step's KV is already written."""
    return {
        "cache_seqlens": metadata.cache_seqlens,
        "block_table": metadata.block_table,
        "causal": True,
        "window_size": window_size(window),
        "softmax_scale": head_dim**-0.5,
    }


@dataclass(frozen=True, slots=True)
class FlashVarlenStep:
    metadata: VarlenMetadata
    flash_attn: Any
    """The library."""

    def attend(
        self, queries: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *, window: int | None
    ) -> torch.Tensor:
        arguments = varlen_arguments(self.metadata, window, queries.shape[-1])
        output: torch.Tensor = self.flash_attn.flash_attn_varlen_func(queries, key_pages, value_pages, **arguments)
        return output


@dataclass(frozen=True, slots=True)
class FlashDecodeStep:
    metadata: DecodeMetadata
    flash_attn: Any
    """The library."""

    def attend(
        self, queries: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *, window: int | None
    ) -> torch.Tensor:
        # q: [num_seqs, 1, num_heads, head_dim]
        arguments = decode_arguments(self.metadata, window, queries.shape[-1])
        output: torch.Tensor = self.flash_attn.flash_attn_with_kvcache(
            queries[:, None], key_pages, value_pages, **arguments
        )
        return output[:, 0]


class FlashAttention:
    """Raises ImportError when flash-attn is not installed."""

    name = "flash_attn"
    page_multiple = 256
    default_page_size = 256

    def __init__(self) -> None:
        self._flash_attn = importlib.import_module("flash_attn")

    def prepare(
        self, batch: StepBatch, *, page_size: int, windows: Set[int | None], dtype: torch.dtype, device: torch.device
    ) -> FlashVarlenStep | FlashDecodeStep:
        if decode_only(batch):
            return FlashDecodeStep(decode_metadata(batch, device), self._flash_attn)
        return FlashVarlenStep(varlen_metadata(batch, device), self._flash_attn)

    def decode_step(
        self,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        page_size: int,
        windows: Set[int | None],
        dtype: torch.dtype,
    ) -> FlashDecodeStep:
        return FlashDecodeStep(DecodeMetadata(context_lens, block_table), self._flash_attn)
