"""Linear layers with FP8 weights: e4m3 with a scale a row on both sides, by torch._scaled_mm.

    y[m, n] = x_scale[m] · w_scale[n] · Σ_k x8[m, k] · w8[n, k]        x is quantized as it comes, row by row

A row's scale depends on that row alone, so a token's result does not depend on its batch mates' values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from gpu_worker.float8 import quantize_rows
from gpu_worker.llama import CausalLM
from wire.errors import ConfigInvalid

VARIABLE = "PHASEMESH_WEIGHT_DTYPE"
_MULTIPLE = 16
"""torch._scaled_mm takes matrices whose both sides are multiples of this."""
_TENSOR_SCALES_FROM = (8, 9)
_ROW_SCALES_FROM = (9, 0)

ScaledMatmul: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
"""(x8 [m, k], x_scale [m, 1], w8 [n, k], w_scale [n, 1], output dtype) → [m, n]."""


def row_scaled(
    x8: torch.Tensor, x_scale: torch.Tensor, w8: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Both scales applied by the matmul itself; its output is bfloat16."""
    result = torch._scaled_mm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale.t(), out_dtype=torch.bfloat16)
    return result.to(dtype)


def tensor_scaled(
    x8: torch.Tensor, x_scale: torch.Tensor, w8: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """For GPUs whose matmul takes one scale a tensor: 1 there, the rows' own scales after it."""
    one = torch.ones((), device=x8.device)
    result = torch._scaled_mm(x8, w8.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    return (result.float() * x_scale * w_scale.t()).to(dtype)


def emulated(
    x8: torch.Tensor, x_scale: torch.Tensor, w8: torch.Tensor, w_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The same grid in float32 on any device: the reference of the other two."""
    return (x8.float() @ w8.float().t() * x_scale * w_scale.t()).to(dtype)


class Float8Linear(nn.Module):
    """A linear layer quantized from another. x: [num_rows, in_features] → the same dtype [num_rows, out_features]."""

    weight8: torch.Tensor  # e4m3 [out_features, in_features]
    weight_scale: torch.Tensor  # float32 [out_features, 1]

    def __init__(self, linear: nn.Linear, matmul: ScaledMatmul) -> None:
        super().__init__()
        values, scales = quantize_rows(linear.weight)
        self.register_buffer("weight8", values)
        self.register_buffer("weight_scale", scales)
        self.bias = linear.bias
        self._matmul = matmul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x8, x_scale = quantize_rows(x)
        result = self._matmul(x8, x_scale, self.weight8, self.weight_scale, x.dtype)
        return result if self.bias is None else result + self.bias


def choose_matmul(device: torch.device, capability: tuple[int, int] | None) -> ScaledMatmul:
    """How FP8 is multiplied on a device. Raises ConfigInvalid where it cannot be.

    capability: of a CUDA device, as torch.cuda.get_device_capability gives it.
    """
    if device.type != "cuda" or capability is None:
        raise ConfigInvalid(f"{VARIABLE}=float8: needs a CUDA device, not {device}", param=VARIABLE)
    if capability < _TENSOR_SCALES_FROM:
        raise ConfigInvalid(
            f"{VARIABLE}=float8: needs compute capability 8.9 (Ada) or above, not {capability[0]}.{capability[1]}",
            param=VARIABLE,
        )
    return row_scaled if capability >= _ROW_SCALES_FROM else tensor_scaled


def quantize_linears(model: CausalLM, matmul: ScaledMatmul) -> None:
    """Replace every layer's projections, one by one, so that memory never holds both copies of more than one.

    Embedding, norms and head stay: they are few bytes beside the rest, and the head's rounding goes straight into the
    logits. Raises ConfigInvalid naming a matrix whose sides FP8 cannot have.
    """
    for name, module in list(model.model.layers.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        if module.in_features % _MULTIPLE or module.out_features % _MULTIPLE:
            raise ConfigInvalid(
                f"{VARIABLE}=float8: layers.{name} is {module.out_features} x {module.in_features}, "
                f"not multiples of {_MULTIPLE}",
                param=VARIABLE,
            )
        parent, _, child = name.rpartition(".")
        setattr(model.model.layers.get_submodule(parent), child, Float8Linear(module, matmul))
