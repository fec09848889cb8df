"""The torch model with its KV pages: what a worker runs its steps on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from gpu_worker.attention.port import AttentionBackend, StepAttention
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.model_config import DecoderConfig
from gpu_worker.model_port import StepOutput
from gpu_worker.rope import RotaryEmbedding
from gpu_worker.sampler import sample
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.port import KvPages
from gpu_worker.upload import upload
from wire.plan import ModelCard, PageCopy


class LanguageModel(Protocol):
    """CausalLM, or the same over the CPU kernels."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        slots: torch.Tensor,
        attention: StepAttention,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


class TorchModelRunner:
    """Implements gpu_worker.model_port.ModelRunner. threads: intra-op threads of torch; None takes every core."""

    def __init__(
        self,
        card: ModelCard,
        config: DecoderConfig,
        model: LanguageModel,
        attention: AttentionBackend,
        kv_cache: KVCache,
        *,
        threads: int | None = None,
    ) -> None:
        self.card = card
        self.num_pages = kv_cache.layout.num_pages
        self.page_size = kv_cache.layout.page_size
        self.device = kv_cache.keys.device
        self.attention_backend = attention.name
        self._model = model
        self._attention = attention
        self._kv_cache = kv_cache
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, self.device)
        self._windows = frozenset(config.layer_windows)
        self._dtype = kv_cache.layout.kv_format.compute_dtype
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
        sampled = sample(logits, sampling, self.card)
        return StepOutput(sampled, (time.perf_counter_ns() - forwarded_ns) // 1000)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the KV of every token of `batch`; return float32 logits [len(batch.logit_rows), vocab_size].

        Rows are in the order of `logit_rows`; with none, the KV is still written.
        """
        attention = self._attention.prepare(
            batch, page_size=self.page_size, windows=self._windows, dtype=self._dtype, device=self.device
        )
        return self._model(
            self._token_ids(batch),
            self._rotary.cos_sin(self._indices(batch.positions), self._dtype),
            self._kv_cache,
            self._indices(batch.slot_mapping),
            attention,
            self._indices(batch.logit_rows),
        )

    @torch.no_grad()
    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy slots [0, num_slots) of each source page to its target page, in every layer, in order."""
        self._kv_cache.copy_pages(copies)

    def _token_ids(self, batch: StepBatch) -> torch.Tensor:
        return self._indices(batch.token_ids)

    def _indices(self, values: list[int]) -> torch.Tensor:
        return upload(values, torch.int64, self.device)
