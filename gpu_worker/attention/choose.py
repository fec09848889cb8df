"""Which attention backend a worker uses."""

from __future__ import annotations

import torch

from gpu_worker.attention import cpu_backend, flash_attn_backend
from gpu_worker.attention.cpu_backend import CpuAttention
from gpu_worker.attention.flash_attn_backend import FlashAttention
from gpu_worker.attention.port import AttentionBackend
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.kernels.library import Kernels
from gpu_worker.kv_format import Float8KV, KVFormat
from wire.errors import ConfigInvalid

VARIABLE = "PHASEMESH_ATTENTION_BACKEND"


def choose(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    head_dim: int,
    kernels: Kernels | None = None,
    capability: tuple[int, int] | None = None,
    kv_format: KVFormat | None = None,
) -> AttentionBackend:
    """`torch`, `flash_attn`, `cpu`, or `auto`: of flash-attn and the CPU kernel the one that can run, else torch.

    kernels: on a CPU, where they are built. capability: of a CUDA device. kv_format: None: plain rows of `dtype`.
    Raises ConfigInvalid when the backend asked for cannot run, saying why.
    """
    if isinstance(kv_format, Float8KV):
        if name not in ("auto", "torch"):
            raise ConfigInvalid(f"{VARIABLE}={name}: reads no float8 KV, which only torch does", param=VARIABLE)
        return TorchAttention(kv_format)
    flash_obstacle = flash_attn_backend.obstacle(device, dtype, head_dim, capability)
    cpu_obstacle = cpu_backend.obstacle(kernels, dtype, head_dim)
    match name:
        case "torch":
            return TorchAttention()
        case "auto" | "flash_attn" if flash_obstacle is None:
            return FlashAttention()
        case "auto" | "cpu" if kernels is not None and cpu_obstacle is None:
            return CpuAttention(kernels)
        case "auto":
            return TorchAttention()
        case "flash_attn" | "cpu":
            obstacle = flash_obstacle if name == "flash_attn" else cpu_obstacle
            raise ConfigInvalid(f"{VARIABLE}={name}: {obstacle}", param=VARIABLE)
        case _:
            raise ConfigInvalid(f"{VARIABLE}={name!r}: one of auto, torch, flash_attn, cpu", param=VARIABLE)


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
