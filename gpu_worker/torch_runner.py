"""The torch model over paged KV, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gpu_worker.attention.port import AttentionBackend, StepAttention
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import DecoderConfig
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.rope import RotaryEmbedding
from gpu_worker.step_batch import StepBatch
from gpu_worker.upload import upload
from wire.plan import ModelCard


class LanguageModel(Protocol):
    """CausalLM, its linear layers perhaps quantized."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        slots: torch.Tensor,
        attention: StepAttention,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor: ...


class TorchModelRunner(PagedModelRunner):
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
        super().__init__(card, kv_cache, attention_backend=attention.name, threads=threads)
        self._model = model
        self._attention = attention
        self._rotary = RotaryEmbedding(config.rope, config.head_dim, self.device)
        self._windows = frozenset(config.layer_windows)
        self._dtype = kv_cache.layout.kv_format.compute_dtype

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """As PagedModelRunner's."""
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

    def _token_ids(self, batch: StepBatch) -> torch.Tensor:
        return self._indices(batch.token_ids)

    def _indices(self, values: Sequence[int]) -> torch.Tensor:
        return upload(values, torch.int64, self.device)
