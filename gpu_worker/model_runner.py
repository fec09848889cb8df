"""From a model directory to a runner: weights, attention, KV pages, and on a GPU its graphs."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from gpu_worker.activation_dtype import choose_activation_dtype
from gpu_worker.attention import cpu_backend
from gpu_worker.attention.choose import choose, page_size_for
from gpu_worker.cuda.open_runner import open_cuda_runner
from gpu_worker.float8 import FLOAT8
from gpu_worker.float8_linear import choose_matmul, quantize_linears
from gpu_worker.kernels.decoder import KernelModelRunner
from gpu_worker.kernels.library import Kernels, load_kernels
from gpu_worker.kernels.packed import load_packed
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.kv_format import KVFormat, choose_kv_format
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import DecoderConfig, context_limit, load_decoder_config
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.torch_runner import TorchModelRunner
from gpu_worker.weight_dtype import WeightDtype, choose_weight_dtype
from gpu_worker.weights import checkpoint_dtype, load_weights, served_revision
from wire.errors import ConfigInvalid
from wire.plan import ModelCard

log = logging.getLogger("gpu_worker.model_runner")


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
    kv_dtype: str = "auto",
    cuda_graphs: bool = True,
    activation_dtype: str = "auto",
) -> PagedModelRunner:
    """Load a Hugging Face directory and make its KV pages.

    device: a torch device, or `auto`: cuda when there is one. page_size: tokens, None: the attention backend's.
    num_pages None: as many as kv_memory_bytes holds. max_model_len: tokens, None: the model's own limit.
    kernels_dir: where the CPU kernels and the weights they pack are kept; None: do without them.
    threads: intra-op threads of the compute thread; None: every core.
    kv_dtype: `auto`, or `float8` on CUDA. cuda_graphs: capture decode steps where the attention backend allows it.
    activation_dtype: what inputs of linear layers are rounded to, as choose_activation_dtype says.
    Raises ModelUnsupported when the directory is not one we can run exactly, ConfigInvalid for the other arguments.
    """
    config = load_decoder_config(model_dir)
    torch_device = _device(device)
    max_model_len = context_limit(config, max_model_len)
    kernels = _kernels(kernels_dir, torch_device, attention_backend, config.head_dim)
    weights = choose_weight_dtype(weight_dtype, checkpoint_dtype(model_dir), torch_device, kernels=kernels is not None)
    weights = choose_activation_dtype(
        activation_dtype,
        weights,
        torch_device,
        dots=None if kernels is None else kernels.dots,
        depths=config.linear_depths,
    )
    dtype = weights.compute
    with torch.device("meta"):
        model = CausalLM(config)
    packed = None
    if kernels is not None and kernels_dir is not None:
        packed = load_packed(model, config, model_dir, weights.stored, kernels_dir, dots=weights.dots)
    else:
        _load_weights(model, model_dir, weights, torch_device)
    kv_format = choose_kv_format(kv_dtype, dtype, torch_device, config.head_dim)
    attention = choose(
        attention_backend,
        torch_device,
        dtype,
        head_dim=config.head_dim,
        kernels=kernels,
        capability=_capability(torch_device),
        kv_format=kv_format,
    )
    layout = KVLayout.sized(
        config,
        page_size=page_size_for(attention, page_size),
        kv_format=kv_format,
        num_pages=num_pages,
        memory_bytes=kv_memory_bytes,
    )
    card = _model_card(config, name, served_revision(model_dir, weights.rounding), max_model_len, kv_format)
    if torch_device.type == "cuda":
        return open_cuda_runner(
            card, config, model, attention, layout, torch_device, graphs=cuda_graphs, threads=threads
        )
    if kernels is not None and packed is not None:
        kv_cache = KVCache(layout, torch_device, copy_runs=kernels.copy_runs)
        return KernelModelRunner(card, config, packed, kernels, kv_cache, threads=threads)
    return TorchModelRunner(card, config, model, attention, KVCache(layout, torch_device), threads=threads)


def _model_card(config: DecoderConfig, name: str, revision: str, max_model_len: int, kv_format: KVFormat) -> ModelCard:
    return ModelCard(
        name=name,
        revision=revision,
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        kv_dtype=kv_format.name,
    )


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


def _load_weights(model: CausalLM, model_dir: Path, weights: WeightDtype, device: torch.device) -> None:
    if weights.stored is not FLOAT8:
        return load_weights(model, model_dir, weights, device)
    matmul = choose_matmul(device, _capability(device))
    load_weights(model, model_dir, replace(weights, stored=weights.compute), device)
    return quantize_linears(model, matmul)


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


def _capability(device: torch.device) -> tuple[int, int] | None:
    """A CUDA device's compute capability."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
