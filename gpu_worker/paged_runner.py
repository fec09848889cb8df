"""What all runners of a model with paged KV have in common; a forward pass is what they differ in."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.model_port import StepOutput
from gpu_worker.sampler import DrawnRow, draw_each, find_largest, sample
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.port import KvPages
from wire.plan import ModelCard, PageCopy


class PagedModelRunner(ABC):
    """Implements gpu_worker.model_port.ModelRunner. threads: of the compute thread's operators; None: every core."""

    def __init__(
        self,
        card: ModelCard,
        kv_cache: KVCache,
        *,
        attention_backend: str,
        threads: int | None = None,
    ) -> None:
        self.card = card
        self.num_pages = kv_cache.layout.num_pages
        self.page_size = kv_cache.layout.page_size
        self.device = kv_cache.keys.device
        self.attention_backend = attention_backend
        self._kv_cache = kv_cache
        self._threads = threads or os.cpu_count() or 1

    @property
    def kv(self) -> KvPages:
        """The pages for transfers, which run beside the steps."""
        return self._kv_cache.transfers

    @property
    def kv_layout(self) -> KVLayout:
        return self._kv_cache.layout

    @contextmanager
    def compute_thread(self) -> Iterator[None]:
        """Entered by the thread that steps, around all of its steps."""
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            yield

    def step(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> StepOutput:
        """Write the KV of every token of `batch` and draw the next token of each sequence in `sampling`."""
        logits = self.forward(batch)
        forwarded_ns = time.perf_counter_ns()
        sampled = sample(logits, sampling, self.card, self._find_largest, self._draw)
        return StepOutput(sampled, (time.perf_counter_ns() - forwarded_ns) // 1000)

    @abstractmethod
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the KV of every token of `batch`; return float32 logits [len(batch.logit_rows), vocab_size].

        Rows are in the order of `logit_rows`; with none, the KV is still written. They are valid until the next step.
        """

    def _find_largest(self, logits: torch.Tensor) -> tuple[list[float], list[int]]:
        """Implements gpu_worker.sampler.FindLargest for the logits of the last forward pass."""
        return find_largest(logits)

    def _draw(self, rows: Sequence[DrawnRow]) -> list[int | None]:
        """Implements gpu_worker.sampler.Draw."""
        return draw_each(rows)

    @torch.no_grad()
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy slots [0, num_slots) of each source page to its target page, in every layer, in order."""
        self._kv_cache.copy_pages(copies)
