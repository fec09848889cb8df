"""A model in torch with its KV pages: what a worker runs its steps on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from gpu_worker.attention.choose import choose, page_size_for
from gpu_worker.attention.port import AttentionBackend, StepAttention
from gpu_worker.kernels.decoder import PackedCausalLM
from gpu_worker.kernels.library import Kernels, load_kernels
from gpu_worker.kernels.packed import load_packed
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import DecoderConfig, context_limit, load_decoder_config
from gpu_worker.model_port import StepOutput
from gpu_worker.rope import RotaryEmbedding
from gpu_worker.sampler import sample
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.weights import load_weights, resolve_dtype, weights_revision
from wire.errors import ConfigInvalid
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
        self._dtype = kv_cache.layout.dtype
        self._threads = threads or os.cpu_count() or 1

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
    threads: int | None = None,
) -> TorchModelRunner:
    """Load a Hugging Face directory and make its KV pages.

    device: a torch device, or `auto`: cuda when there is one. page_size: tokens, None: the attention backend's.
    num_pages None: as many as kv_memory_bytes holds. max_model_len: tokens, None: the model's own limit.
    kernels_dir: where the CPU kernels and the weights they pack are kept; None: do without them.
    threads: intra-op threads of the compute thread; None: every core.
    Raises ModelUnsupported when the directory is not one we can run exactly, ConfigInvalid for the other arguments.
    """
    config = load_decoder_config(model_dir)
    torch_device = _device(device)
    max_model_len = context_limit(config, max_model_len)
    kernels = load_kernels(kernels_dir) if kernels_dir is not None and torch_device.type == "cpu" else None
    model, dtype = _load_model(config, model_dir, weight_dtype, torch_device, kernels, kernels_dir)
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
        revision=weights_revision(model_dir),
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        kv_dtype=str(dtype).removeprefix("torch."),
    )
    return TorchModelRunner(card, config, model, attention, KVCache(layout, torch_device), threads=threads)


def _load_model(
    config: DecoderConfig,
    model_dir: Path,
    weight_dtype: str,
    device: torch.device,
    kernels: Kernels | None,
    kernels_dir: Path | None,
) -> tuple[LanguageModel, torch.dtype]:
    """The model, and the type it computes in."""
    with torch.device("meta"):
        model = CausalLM(config)
    if kernels is None or kernels_dir is None:
        return model, load_weights(model, model_dir, weight_dtype, device)
    resolve_dtype(weight_dtype, torch.float32, device)
    return PackedCausalLM(config, load_packed(model, config, model_dir, kernels_dir), kernels), torch.float32


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
