"""The 8-bit grid that FP8 weights and FP8 KV share: e4m3 (https://arxiv.org/abs/2209.05433, §3) with a scale a row.

A row x is stored as q = e4m3(x / s) with s = max|x| / 448, and read as q · s: every element is off by at most 2^-4 of
itself (half a step of 3 mantissa bits) or 2^-10 · s (half a step of the subnormals), whichever is more.
"""

from __future__ import annotations

import torch

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3: 1.75 · 2^8."""
_SMALLEST_SCALE = 2.0**-100
"""Of a row of zeros, where any would do but 0."""


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., columns] → e4m3 [..., columns], float32 scales [..., 1]; rows · approximately values · scales."""
    rows32 = rows.float()
    scales = (rows32.abs().amax(-1, keepdim=True) / LARGEST).clamp(min=_SMALLEST_SCALE)
    # Rounding in the division may step over the largest value, which the cast would make NaN.
    return (rows32 / scales).clamp(-LARGEST, LARGEST).to(FLOAT8), scales
