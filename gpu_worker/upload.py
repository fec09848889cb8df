"""Host lists to device tensors, without making the host wait where the device is a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of (nested) `values` on `device`.

    For CUDA it is staged in pinned memory and copied in stream order. The staging block may be dropped at once:
    torch's host allocator hands it out again only when the copy has ended.
    """
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype).to(device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
