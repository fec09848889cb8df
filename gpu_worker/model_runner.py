"""A model in torch with its KV pages: what a worker runs its steps on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch

from gpu_worker.attention import cpu_backend
from gpu_worker.attention.choose import choose, page_size_for
from gpu_worker.attention.port import AttentionBackend, StepAttention
from gpu_worker.kernels.decoder import PackedCausalLM
from gpu_worker.kernels.library import Kernels, load_kernels
from gpu_worker.kernels.packed import load_packed
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import DecoderConfig, load_decoder_config
from gpu_worker.rope import RotaryEmbedding
from gpu_worker.step_batch import StepBatch
from gpu_worker.weight_dtype import WeightDtype, choose_weight_dtype
from gpu_worker.weights import checkpoint_dtype, load_weights, served_revision
from wire.errors import ConfigInvalid
from wire.plan import ModelCard, PageCopy

log = logging.getLogger("gpu_worker.model_runner")


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
    """Implements gpu_worker.model_port.ModelRunner."""

    def __init__(
        self,
        card: ModelCard,
        config: DecoderConfig,
        model: LanguageModel,
        attention: AttentionBackend,
        kv_cache: KVCache,
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
        self._dtype = kv_cache.layout.dtype

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Write the KV of every token of `batch`; return float32 logits [len(batch.logit_rows), vocab_size].

        Rows are in the order of `logit_rows`; with none, the KV is still written.
        """
        attention = self._attention.prepare(
            batch, page_size=self.page_size, windows=self._windows, dtype=self._dtype, device=self.device
        )
        return self._model(
            self._indices(batch.token_ids),
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

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


def load_runner(
    model_dir: Path,
    *,
    device: str,
    weight_dtype: str,
    attention_backend: str,
    page_size: int | None,
    num_pages: int | None,
    kv_memory_bytes: int,
    max_model_len: int | None,
    name: str,
    kernels_dir: Path | None = None,
) -> TorchModelRunner:
    """Load a Hugging Face directory and make its KV pages.

    device: a torch device, or `auto`: cuda when there is one. page_size: tokens, None: the attention backend's.
    num_pages None: as many as kv_memory_bytes holds. max_model_len: tokens, None: the model's own limit.
    kernels_dir: where the CPU kernels and the weights they pack are kept; None: do without them.
    Raises ModelUnsupported when the directory is not one we can run exactly, ConfigInvalid for the other arguments.
    """
    config = load_decoder_config(model_dir)
    torch_device = _device(device)
    context_limit = _context_limit(config, max_model_len)
    kernels = _kernels(kernels_dir, torch_device, attention_backend, config.head_dim)
    weights = choose_weight_dtype(
        weight_dtype,
        checkpoint_dtype(model_dir),
        torch_device,
        kernels=kernels is not None,
    )
    dtype = weights.compute
    model = _load_model(config, model_dir, weights, torch_device, kernels, kernels_dir)
    attention = choose(attention_backend, torch_device, dtype, head_dim=config.head_dim, kernels=kernels)
    layout = KVLayout.sized(
        config,
        page_size=page_size_for(attention, page_size),
        dtype=dtype,
        num_pages=num_pages,
        memory_bytes=kv_memory_bytes,
    )
    card = ModelCard(
        name=name,
        revision=served_revision(model_dir, weights.rounding),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=context_limit,
        eos_token_ids=config.eos_token_ids,
        kv_dtype=str(dtype).removeprefix("torch."),
    )
    return TorchModelRunner(card, config, model, attention, KVCache(layout, torch_device))


def _kernels(kernels_dir: Path | None, device: torch.device, attention_backend: str, head_dim: int) -> Kernels | None:
    """The CPU kernels, which do a whole step: with another attention than theirs, torch does it all."""
    if kernels_dir is None or device.type != "cpu" or attention_backend not in ("auto", cpu_backend.CpuAttention.name):
        return None
    kernels = load_kernels(kernels_dir)
    obstacle = cpu_backend.obstacle(kernels, torch.float32, head_dim)
    if obstacle is not None and attention_backend == "auto":
        log.warning("CPU kernels: attention %s; torch's own are used", obstacle)
        return None
    return kernels


def _load_model(
    config: DecoderConfig,
    model_dir: Path,
    weights: WeightDtype,
    device: torch.device,
    kernels: Kernels | None,
    kernels_dir: Path | None,
) -> LanguageModel:
    with torch.device("meta"):
        model = CausalLM(config)
    if kernels is None or kernels_dir is None:
        load_weights(model, model_dir, weights, device)
        return model
    return PackedCausalLM(config, load_packed(model, config, model_dir, weights.stored, kernels_dir), kernels)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigInvalid(f"PHASEMESH_DEVICE={name!r}: {reason}", param="PHASEMESH_DEVICE") from error
    return device


def _context_limit(config: DecoderConfig, max_model_len: int | None) -> int:
    if max_model_len is None:
        return config.context_limit
    if max_model_len > config.context_limit:
        raise ConfigInvalid(
            f"PHASEMESH_MAX_MODEL_LEN={max_model_len}: the model is meant for at most {config.context_limit} tokens",
            param="PHASEMESH_MAX_MODEL_LEN",
        )
    return max_model_len
