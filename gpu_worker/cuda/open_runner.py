"""A CUDA device's runner, its parts chosen and its graphs captured."""

from __future__ import annotations

from dataclasses import replace

import torch

from gpu_worker.attention.port import AttentionBackend, GraphableAttention
from gpu_worker.cuda.copy_out import SideStreamCopy
from gpu_worker.cuda.decode_graphs import CaptureBudget
from gpu_worker.cuda.graph_port import CudaGraphRecorder
from gpu_worker.cuda.runner import CudaModelRunner
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.model_config import DecoderConfig
from gpu_worker.torch_runner import LanguageModel
from wire.plan import ModelCard


def open_cuda_runner(
    card: ModelCard,
    config: DecoderConfig,
    model: LanguageModel,
    attention: AttentionBackend,
    layout: KVLayout,
    device: torch.device,
    *,
    graphs: bool,
) -> CudaModelRunner:
    """One page more than `layout` has is allocated: the spare one. Raises ConfigInvalid when that does not fit."""
    assert isinstance(attention, GraphableAttention)  # both backends that run on CUDA are
    kv_cache = KVCache(replace(layout, num_pages=layout.num_pages + 1), device)
    runner = CudaModelRunner(card, config, model, attention, kv_cache, SideStreamCopy(device))
    if graphs:
        with torch.cuda.device(device):
            runner.capture(CudaGraphRecorder(device), CaptureBudget())
    return runner
