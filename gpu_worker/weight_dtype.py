"""Which type a model's weights are held in, and what that does to their values.

Only matrices (linear layers, the embedding) are held in fewer bits; norms, biases and all arithmetic on a CPU stay
float32, unless inputs of linear layers are rounded too (activation_dtype.py). A path that cannot multiply a type as it
is stored rounds the weights to it and computes in float32, so that every path of one weight type, and of inputs not
rounded, computes the same function.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wire.errors import ConfigInvalid

INT8_GROUP = 64
"""Weights of one output column, next to each other in depth, that share an int8 scale."""
INT8_MAX = 127
_OPTIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True)
class WeightDtype:
    stored: torch.dtype
    """Of the matrices: float32, bfloat16, or int8 with scales; on a GPU float16, or float8 with scales, but no int8."""
    compute: torch.dtype
    """Of activations and KV."""
    rounding: str | None
    """The stored type's name when the checkpoint's values do not survive it; None: they are served as they are.
    Where inputs of linear layers are rounded it names both types, always."""
    dots: bool = False
    """Whether inputs of linear layers are rounded to the stored type (activation_dtype.py)."""


def choose_weight_dtype(option: str, checkpoint: torch.dtype, device: torch.device, *, kernels: bool) -> WeightDtype:
    """What PHASEMESH_WEIGHT_DTYPE means for a checkpoint whose matrices are `checkpoint`.

    `auto` changes no value: on a CPU a bfloat16 checkpoint stays bfloat16 where `kernels` read it, and everything
    else is float32; elsewhere the checkpoint's own type. Raises ConfigInvalid for an unknown option, for int8 on
    a device other than the CPU, and for float8 on one other than CUDA.
    """
    on_cpu = device.type == "cpu"
    if option == "auto":
        stored = checkpoint if not on_cpu or (kernels and checkpoint is torch.bfloat16) else torch.float32
    elif option not in _OPTIONS:
        raise _refusal(option, f"one of auto, {', '.join(_OPTIONS)}")
    else:
        stored = _OPTIONS[option]
    if stored is torch.int8 and not on_cpu:
        raise _refusal(option, f"implemented on the CPU; on {device.type} one of auto, float32, bfloat16")
    if stored is torch.float8_e4m3fn and device.type != "cuda":
        raise _refusal(option, f"needs a CUDA device, not {device}")
    is_exact = stored in (torch.float32, checkpoint)
    return WeightDtype(
        stored=stored,
        compute=_compute_dtype(stored, checkpoint, device),
        rounding=None if is_exact else str(stored).removeprefix("torch."),
    )


def _compute_dtype(stored: torch.dtype, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    if stored is torch.float8_e4m3fn:
        return checkpoint if checkpoint is not torch.float32 else torch.bfloat16
    return stored


def _refusal(option: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid(f"PHASEMESH_WEIGHT_DTYPE={option!r}: {reason}", param="PHASEMESH_WEIGHT_DTYPE")


def embedding_dtype(stored: torch.dtype) -> torch.dtype:
    """An embedding that is not the head too is looked up, never multiplied: int8 would save nothing that is read."""
    return torch.bfloat16 if stored is torch.int8 else stored


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [columns, depth] → int8 [columns, depth] and float32 scales [columns, ceil(depth / 64)].

    Symmetric, rounded to nearest even: scale = max |w| / 127 of the group, q = round(w / scale) in [-127, 127]. A group
    of zeros has scale 0; one that is not finite has a scale that is not, and comes back as NaN.
    """
    columns, depth = weight.shape
    groups, scales = _groups(weight), group_scales(weight)
    steps = (groups / scales.unsqueeze(-1)).round_().nan_to_num_(0.0).clamp_(-INT8_MAX, INT8_MAX)
    return steps.view(columns, -1)[:, :depth].to(torch.int8), scales


def group_scales(weight: torch.Tensor) -> torch.Tensor:
    """weight [columns, depth] → quantize's scales."""
    low, high = _groups(weight).aminmax(dim=-1)
    return torch.maximum(high, -low) / INT8_MAX


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """weight [columns, depth] → float32 [columns, ceil(depth / 64), 64], padded with zeros."""
    columns, depth = weight.shape
    padding = -depth % INT8_GROUP
    padded = torch.nn.functional.pad(weight.float(), (0, padding)) if padding else weight.float()
    return padded.view(columns, -1, INT8_GROUP)


def dequantize(steps: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 weights [columns, depth] that quantize's results stand for: each product rounded once."""
    return steps.float() * scales.repeat_interleave(INT8_GROUP, dim=1)[:, : steps.shape[1]]


def rounded(weight: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """weight [columns, depth] → the float32 weights that are left of it when it is held as `stored`."""
    if stored is torch.int8:
        return dequantize(*quantize(weight))
    return weight.to(stored).float()
