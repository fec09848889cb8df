"""Whether inputs of linear layers are rounded to the weights' type, which some CPUs multiply faster than float32.

A row is rounded by itself, bfloat16 to nearest even, int8 to the scales of weight_dtype.quantize (by a product with
127 / max, so that a value in the middle of two steps may take the other one). Sums, norms, softmax, attention and KV
stay float32.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from dataclasses import replace

import torch

from gpu_worker.kernels.library import DOTS_DEPTH
from gpu_worker.weight_dtype import WeightDtype
from wire.errors import ConfigInvalid

log = logging.getLogger("gpu_worker.activation_dtype")

VARIABLE = "PHASEMESH_ACTIVATION_DTYPE"
_ROUNDED = {"bfloat16": torch.bfloat16, "int8": torch.int8}
_OPTIONS = ("auto", "float32", *_ROUNDED)
_INSTRUCTIONS = {torch.bfloat16: "AVX512_BF16", torch.int8: "AVX512_VNNI"}


def choose_activation_dtype(
    option: str,
    weights: WeightDtype,
    device: torch.device,
    *,
    dots: Set[torch.dtype] | None,
    depths: Iterable[int],
) -> WeightDtype:
    """What PHASEMESH_ACTIVATION_DTYPE makes of `weights`, for linear layers of these depths.

    `auto` is int8 where weights are held as int8 and their products with int8 are possible, else float32: values that
    are served as they are stay so. dots: Kernels.dots, None without kernels. Raises ConfigInvalid for an unknown
    option, for any but `auto` on a device other than the CPU, and for a type that is not possible.
    """
    if option not in _OPTIONS:
        raise _refusal(option, f"one of {', '.join(_OPTIONS)}")
    if device.type != "cpu":
        if option != "auto":
            raise _refusal(option, f"implemented on the CPU; on {device.type} only auto")
        return weights
    if option == "float32" or (option == "auto" and weights.stored is not torch.int8):
        return weights
    wanted = _ROUNDED.get(option, torch.int8)
    obstacle = _obstacle(wanted, weights.stored, dots, depths)
    if obstacle is None:
        return replace(weights, dots=True, rounding=f"{_name(wanted)}-a{8 * wanted.itemsize}")
    if option != "auto":
        raise _refusal(option, obstacle)
    log.info("int8 weights, but inputs of linear layers stay float32: %s", obstacle)
    return weights


def _obstacle(
    wanted: torch.dtype, stored: torch.dtype, dots: Set[torch.dtype] | None, depths: Iterable[int]
) -> str | None:
    """Why inputs cannot be rounded to this type, if they cannot."""
    if stored is not wanted:
        return f"needs weights held as {_name(wanted)} (PHASEMESH_WEIGHT_DTYPE), not {_name(stored)}"
    if dots is None:
        return (
            "needs the CPU kernels, which are off (PHASEMESH_CPU_KERNELS), not built, "
            "or not used (PHASEMESH_ATTENTION_BACKEND, head dimension)"
        )
    if wanted not in dots:
        return f"needs a CPU with {_INSTRUCTIONS[wanted]}, which this one lacks"
    for depth in depths:
        if depth % DOTS_DEPTH:
            return f"needs linear layers of a depth that is a multiple of {DOTS_DEPTH}, not {depth}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(option: str, reason: str) -> ConfigInvalid:
    return ConfigInvalid(f"{VARIABLE}={option!r}: {reason}", param=VARIABLE)
