"""Which attention backend a worker uses."""

from __future__ import annotations

import importlib

import torch

from gpu_worker.attention.flash_attn_backend import FlashAttention
from gpu_worker.attention.port import AttentionBackend
from gpu_worker.attention.torch_backend import TorchAttention
from wire.errors import ConfigInvalid

VARIABLE = "PHASEMESH_ATTENTION_BACKEND"
_FLASH_DTYPES = (torch.float16, torch.bfloat16)


def choose(name: str, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """`torch`, `flash_attn`, or `auto`: flash-attn where it can run, else torch.

    Raises ConfigInvalid when flash_attn is asked for and cannot run, saying why.
    """
    if name == "torch":
        return TorchAttention()
    obstacle = _flash_obstacle(device, dtype)
    if name == "auto":
        return TorchAttention() if obstacle else FlashAttention()
    if name != "flash_attn":
        raise ConfigInvalid(f"{VARIABLE}={name!r}: one of auto, torch, flash_attn", param=VARIABLE)
    if obstacle:
        raise ConfigInvalid(f"{VARIABLE}=flash_attn: {obstacle}", param=VARIABLE)
    return FlashAttention()


def _flash_obstacle(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if dtype not in _FLASH_DTYPES:
        return f"computes in float16 and bfloat16, not {dtype}"
    try:
        importlib.import_module("flash_attn")
    except ImportError as error:
        return f"the flash_attn package cannot be imported ({error})"
    return None


def page_size_for(backend: AttentionBackend, requested: int | None) -> int:
    """The page size asked for, or the backend's own. Raises ConfigInvalid when the backend cannot use it."""
    if requested is None:
        return backend.default_page_size
    if requested < 1 or requested % backend.page_multiple:
        raise ConfigInvalid(
            f"PHASEMESH_KV_PAGE_SIZE={requested}: the {backend.name} attention backend needs a multiple of "
            f"{backend.page_multiple}",
            param="PHASEMESH_KV_PAGE_SIZE",
        )
    return requested
