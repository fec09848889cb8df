"""The port through which a worker's executor runs a model; the torch implementation is gpu_worker/model_runner.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gpu_worker.step_batch import StepBatch
from wire.plan import ModelCard, PageCopy


class ModelRunner(Protocol):
    """A model with its KV pages. Not thread-safe: one caller, one step at a time."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int:
        """Tokens (slots) per page."""
        ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the KV of every token of `batch`; return float32 logits [len(batch.logit_rows), vocab_size].

        Rows are in the order of `logit_rows`; with none, the KV is still written.
        """
        ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy slots [0, num_slots) of each source page to its target page, in every layer, in order."""
        ...
