"""The structs of src/, field by field, as ctypes sees them. Pointers are addresses of tensors that the maker keeps."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from typing import Any

import torch

_P, _I = ctypes.c_void_p, ctypes.c_int64

STORED = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""Types a matrix is stored in: Stored in src/weights.h."""
DOTS_STORED = {torch.bfloat16: 3, torch.uint8: 4}
"""BFLOAT16_PAIRS and INT8_QUADS there, by the type of the panels."""


def address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def integers(values: Iterable[int]) -> array[int]:
    """As int64, for `place`: cheaper to make than a tensor."""
    return array("q", values)


def place(values: array[int] | array[float]) -> int:
    """Their address, as long as they live."""
    return values.buffer_info()[0]


class Linear(ctypes.Structure):
    _fields_ = (
        ("panels", _P), ("scales", _P), ("bias", _P), ("depth", _I), ("columns", _I), ("stored", _I),
    )  # fmt: skip


class AttentionPlan(ctypes.Structure):
    _fields_ = (
        ("tiles", _P), ("num_tiles", _I), ("items", _P), ("num_items", _I), ("tables", _P), ("partials", _P),
    )  # fmt: skip


class Layer(ctypes.Structure):
    _fields_ = (
        ("attention_norm", _P), ("mlp_norm", _P), ("q_norm", _P), ("k_norm", _P),
        ("qkv", Linear), ("output", Linear), ("gate", Linear), ("up", Linear), ("down", Linear),
        ("window", _I), ("keys", _P), ("values", _P),
    )  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(Layer)), ("num_layers", _I), ("hidden", _I), ("heads", _I), ("kv_heads", _I),
        ("head_dim", _I), ("page_size", _I), ("eps", ctypes.c_double), ("norm", _P), ("head", Linear),
        ("embedding", _P), ("embedding_stored", _I),
    )  # fmt: skip


class Workspace(ctypes.Structure):
    _fields_ = (
        ("x", _P), ("normed", _P), ("qkv", _P), ("attended", _P), ("inner", _P), ("scratch", _P),
        ("rounded", _P),
    )  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        ("rows", _I), ("token_ids", _P), ("positions", _P), ("slots", _P), ("cos", _P), ("sin", _P),
        ("attention", AttentionPlan), ("logit_rows", _P), ("num_logit_rows", _I), ("logits", _P),
        ("parts", _P), ("largest", _P), ("workspace", Workspace),
    )  # fmt: skip


class Largest(ctypes.Structure):
    _fields_ = (("value", ctypes.c_double), ("column", _I))


class Draw(ctypes.Structure):
    _fields_ = (
        ("logits", _P), ("changed", _P), ("changes", _P), ("scaled_from", _I), ("scaled_to", _I), ("num_changes", _I),
        ("temperature", ctypes.c_double), ("top_p", ctypes.c_double), ("min_p", ctypes.c_double),
        ("uniform", ctypes.c_double), ("top_k", _I),
    )  # fmt: skip


def made(struct: type[ctypes.Structure], **fields: Any) -> Any:
    """A struct with every field given, by name."""
    assert fields.keys() == {name for name, *_ in struct._fields_}, struct
    return struct(**fields)
