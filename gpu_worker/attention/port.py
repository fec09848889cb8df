"""The port between the model and whatever computes attention over paged KV."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol, runtime_checkable

import torch

from gpu_worker.step_batch import StepBatch


class StepAttention(Protocol):
    """The attention of one step: frozen metadata on the device, made once and used by every layer."""

    def attend(
        self, queries: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, *, window: int | None
    ) -> torch.Tensor:
        """Causal attention, bottom-right aligned: a sequence's queries are the last positions of its context.

        queries: [num_tokens, num_heads, head_dim]; returns the same shape.
        key_pages, value_pages: [num_pages, page_size, num_kv_heads, head_dim] of this layer (row_size where the
        backend reads another KV format), the step's own tokens already written. Scores are scaled by head_dim ** -0.5.
        window: positions a query sees, its own included; one of those the step was prepared with; None: all.
        """
        ...


class AttentionBackend(Protocol):
    """How a model's attention is computed."""

    @property
    def name(self) -> str: ...

    @property
    def page_multiple(self) -> int:
        """Page sizes must be a multiple of this many tokens."""
        ...

    @property
    def default_page_size(self) -> int: ...

    def prepare(
        self, batch: StepBatch, *, page_size: int, windows: Set[int | None], dtype: torch.dtype, device: torch.device
    ) -> StepAttention:
        """Metadata of one step. `windows` are all that the model's layers use, `dtype` that of its activations."""
        ...


@runtime_checkable
class GraphableAttention(AttentionBackend, Protocol):
    """A backend whose decode attention can be captured in a CUDA graph."""

    def decode_step(
        self,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        *,
        page_size: int,
        windows: Set[int | None],
        dtype: torch.dtype,
    ) -> StepAttention:
        """Attention of one token of each sequence, from int32 tensors on the device: [num_seqs], [num_seqs, width].

        Nothing of them is read on the host: a graph that was captured over them serves what they are refilled with.
        """
        ...
