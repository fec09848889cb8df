"""How the K or V of one token and head is stored in its slot: as computed, or in 8 bits with a scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from gpu_worker.float8 import FLOAT8, quantize_rows
from wire.errors import ConfigInvalid

_SCALE_BYTES = 4  # one float32


class KVFormat(Protocol):
    """The bytes of a row: K or V of one token and one KV head."""

    @property
    def name(self) -> str:
        """For the model card: KV is shared only between workers that store it alike."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """What encode takes and decode gives."""
        ...

    @property
    def stored_dtype(self) -> torch.dtype: ...

    def row_size(self, head_dim: int) -> int:
        """Stored elements of a row."""
        ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., head_dim] → [..., row_size]."""
        ...

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """[..., row_size] → [..., head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class PlainKV:
    """Rows as they are computed."""

    compute_dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.compute_dtype).removeprefix("torch.")

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.compute_dtype

    def row_size(self, head_dim: int) -> int:
        return head_dim

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


@dataclass(frozen=True, slots=True)
class Float8KV:
    """e4m3, each row with a scale of its own, so that a row depends on nothing but its token's K or V.

    | head_dim bytes e4m3 | float32 scale |        head_dim is a multiple of 4, for the scale's alignment
    """

    compute_dtype: torch.dtype

    @property
    def name(self) -> str:
        return "float8_e4m3fn"

    @property
    def stored_dtype(self) -> torch.dtype:
        return torch.uint8

    def row_size(self, head_dim: int) -> int:
        return head_dim + _SCALE_BYTES

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_rows(rows)
        return torch.cat((values.view(torch.uint8), scales.view(torch.uint8)), dim=-1)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        values = stored[..., :-_SCALE_BYTES].contiguous().view(FLOAT8)
        scales = stored[..., -_SCALE_BYTES:].contiguous().view(torch.float32)
        return (values.float() * scales).to(self.compute_dtype)


def choose_kv_format(name: str, compute_dtype: torch.dtype, device: torch.device, head_dim: int) -> KVFormat:
    """`auto`: as computed; `float8`, on CUDA. Raises ConfigInvalid for anything else, naming the variable."""
    variable = "PHASEMESH_KV_DTYPE"
    match name:
        case "auto":
            return PlainKV(compute_dtype)
        case "float8" if device.type != "cuda":
            raise ConfigInvalid(f"{variable}=float8: needs a CUDA device, not {device}", param=variable)
        case "float8" if head_dim % _SCALE_BYTES:
            raise ConfigInvalid(
                f"{variable}=float8: needs a head dimension that is a multiple of {_SCALE_BYTES}, not {head_dim}",
                param=variable,
            )
        case "float8":
            return Float8KV(compute_dtype)
        case _:
            raise ConfigInvalid(f"{variable}={name!r}: one of auto, float8", param=variable)
