"""Rows of K and V in 8 bits with one float32 scale each: what PHASEMESH_LOWER_TIER_DTYPE=int8 and float8 store.

    payload  | rows × row elements, 1 byte each | padding to 4 | rows × float32 scale |

int8 rounds a row x to q = round(x / s), s = max|x| / 127: off by at most s / 2 (symmetric, per-token scales as in
https://arxiv.org/abs/2211.10438, §3). float8 is gpu_worker/float8.py's e4m3. Neither gives back the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gpu_worker.float8 import FLOAT8, quantize_rows
from gpu_worker.tiers.unit_codec import Bytes, LowerTierDtype, UnitLayout

_INT8_LARGEST = 127
QUANTIZABLE = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Types of device rows that are numbers, and not quantized already; bytes of an element."""
_SMALLEST_SCALE = 2.0**-100
"""Of a row of zeros, where any would do but 0."""


def _quantize_int8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, elements] → int8 [rows, elements], float32 scales [rows, 1]."""
    rows32 = rows.float()
    scales = (rows32.abs().amax(-1, keepdim=True) / _INT8_LARGEST).clamp(min=_SMALLEST_SCALE)
    return (rows32 / scales).round().to(torch.int8), scales


_KINDS: dict[LowerTierDtype, tuple[torch.dtype, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]] = {
    LowerTierDtype.INT8: (torch.int8, _quantize_int8),
    LowerTierDtype.FLOAT8: (FLOAT8, quantize_rows),
}


class QuantizedRows:
    """Implements unit_codec.RowCoder."""

    def __init__(self, layout: UnitLayout, dtype: LowerTierDtype) -> None:
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        self._stored, self._quantize = _KINDS[dtype]
        self._rows = layout.unit_bytes // layout.row_bytes
        self._elements = layout.row_bytes // self._dtype.itemsize
        self._scales_at = -(-self._rows * self._elements // 4) * 4
        self.payload_bytes = self._scales_at + 4 * self._rows
        # torch's own cast from e4m3 takes ten times as long as a look-up.
        self._values = torch.arange(256, dtype=torch.uint8).view(self._stored).float()

    def encode(self, unit: Bytes, payload: Bytes) -> None:
        rows = torch.from_numpy(unit).view(self._dtype).view(self._rows, self._elements)
        values, scales = self._quantize(rows)
        stored, stored_scales = self._parts(torch.from_numpy(payload))
        stored.copy_(values.view(torch.uint8))
        stored_scales.copy_(scales)

    def decode(self, payload: Bytes) -> Bytes:
        # Only read; of bytes a socket or a file gave, torch would warn that they are not writable.
        stored, scales = self._parts(torch.from_numpy(payload if payload.flags.writeable else payload.copy()))
        rows = stored.view(torch.int8).float() if self._stored is torch.int8 else self._values[stored.int()]
        unit: Bytes = rows.mul_(scales).to(self._dtype).view(torch.uint8).view(-1).numpy()
        return unit

    def _parts(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [rows, elements], float32 [rows, 1]; both share the payload's memory."""
        values = payload[: self._rows * self._elements].view(self._rows, self._elements)
        scales = payload[self._scales_at :].view(torch.float32).view(self._rows, 1)
        return values, scales
