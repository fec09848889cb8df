"""The compiled kernels as functions over float32 CPU tensors, and one that copies KV.

Arguments are what the one caller makes; shapes are asserted, not refused. Those over tensors run on the caller's torch
threads.
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpu_worker.kernels import structs
from gpu_worker.kernels.build import KernelsUnavailable, instruction_sets, library_path
from gpu_worker.kernels.drawing import LogitChanges, draw_scratch_shape, draw_struct
from gpu_worker.kernels.structs import address, integers, place
from gpu_worker.sampler import DrawnRow
from gpu_worker.weight_dtype import group_scales, quantize

log = logging.getLogger("gpu_worker.kernels")

COLUMNS = 16
"""Output columns of a panel of packed weights."""
PANEL_DTYPES = tuple(structs.STORED)
"""Types of weights that the compiled kernels multiply by float32 inputs."""
DOTS_DEPTH = 64
"""Depths of dot products are multiples of it: a rounded row has one scale for so many values."""
_DOTS_VALUES = {torch.bfloat16: 2, torch.int8: 4}
"""Of one column that lie side by side in panels of dots: what one instruction multiplies and adds up."""
SPLIT_TOKENS = 512
"""Positions of one work item of attention: SPLIT in src/attention.h."""
MAX_HEAD_DIM = 256
_PARTIAL_PADDING = 32
"""Of partial_size in src/attention_block.h."""
_TILE_FIELDS, _ITEM_FIELDS = 5, 2
"""Of QueryTile and of an item in src/attention.h."""
_PART_COLUMNS = 4096
"""PART_COLUMNS in src/largest.h."""
_BLOCK_DEPTH = 256
"""BLOCK_DEPTH in src/linear.h."""

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES: dict[str, list[Any]] = {
    "decode": [ctypes.POINTER(structs.Model), ctypes.POINTER(structs.Step), _I],
    "linear": [_P, _I, _I, ctypes.POINTER(structs.Linear), _P, _I, _I, _P, _P, _I],
    "swiglu": [_P, _I, _I, ctypes.POINTER(structs.Linear), ctypes.POINTER(structs.Linear), _P, _I, _P, _P, _I],
    "rms_norm": [_P, _P, _P, _I, _I, _F, _I],
    "rope_and_write": [_P, _P, _P, _F, _P, _P, _P, _P, _P, _P, _I, _I, _I, _I, _I],
    "largest": [_P, _I, _I, _P, _P, _I],
    "draw": [_P, _I, _I, _P, _P, _I],
    "attend": [_P, _I, _P, _P, _P, ctypes.POINTER(structs.AttentionPlan), _I, _I, _I, _I, _I, _I],
    "copy_runs": [_P, _P, _P, _I],
}


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weights as panels, and what turns their products into its outputs.

    panels: float32, bfloat16 or int8 [ceil(columns / 16), depth, 16], the last one padded with zeros, or of dots
    (pack_dots), whose inputs are rounded to the weights' type. bias: float32 [columns]. scales, of int8 alone: float32
    [ceil(columns / 16), ceil(depth / 64), 16]; the weight of depth d and column c of a panel is
    float32(q) * scales[d // 64, c].
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    columns: int
    scales: torch.Tensor | None = None

    @property
    def is_dots(self) -> bool:
        return self.panels.dim() == 4

    @property
    def depth(self) -> int:
        return self.panels.shape[1] * (self.panels.shape[3] if self.is_dots else 1)

    def struct(self) -> Any:
        """For the C side, valid while this lives."""
        return structs.made(
            structs.Linear,
            panels=self.panels.data_ptr(),
            scales=address(self.scales),
            bias=address(self.bias),
            depth=self.depth,
            columns=self.columns,
            stored=(structs.DOTS_STORED if self.is_dots else structs.STORED)[self.panels.dtype],
        )


def pack(weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """weight [columns, depth] → panels [ceil(columns / 16), depth, 16] of float32, bfloat16 or int8."""
    return _panels(quantize(weight)[0] if dtype is torch.int8 else weight.to(dtype))


def pack_dots(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight [columns, depth], depth a multiple of 64 → panels for dot products with rows of `dtype`.

    bfloat16: [ceil(columns / 16), depth / 2, 16, 2]. int8: uint8 [ceil(columns / 16), depth / 4, 16, 4] of q + 128, as
    the instruction multiplies unsigned by signed; 128 stands for zero, in the padding too.
    """
    assert weight.shape[1] % DOTS_DEPTH == 0
    panels = pack(weight, dtype)  # [panels, depth, 16]
    values = _DOTS_VALUES[dtype]
    panels = panels.view(len(panels), -1, values, COLUMNS).transpose(2, 3).contiguous()
    return panels.view(torch.uint8).bitwise_xor_(128) if dtype is torch.int8 else panels


def dots_panels(columns: int, depth: int, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and type of pack_dots' panels."""
    values = _DOTS_VALUES[dtype]
    shape = (-(-columns // COLUMNS), depth // values, COLUMNS, values)
    return shape, torch.uint8 if dtype is torch.int8 else dtype


def pack_scales(weight: torch.Tensor) -> torch.Tensor:
    """weight [columns, depth] → the scales float32 [ceil(columns / 16), ceil(depth / 64), 16] of its int8 panels."""
    return _panels(group_scales(weight))


def _panels(matrix: torch.Tensor) -> torch.Tensor:
    """[columns, n] → [ceil(columns / 16), n, 16], padded with zeros."""
    columns, length = matrix.shape
    padding = -columns % COLUMNS
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, padding)) if padding else matrix
    return padded.view(-1, COLUMNS, length).transpose(1, 2).contiguous()


class AttentionPlan:
    """How the queries of one step attend. tiles, items and tables as of AttentionPlan in src/attention.h.

    tiles, one after the other: first row, queries, first position, where in `tables` its sequence's begins, and where
    in the scratch; items: tile and split. num_partials: rows of scratch, of each head.
    """

    def __init__(self, tiles: Sequence[int], items: Sequence[int], tables: Sequence[int], num_partials: int) -> None:
        self._tiles, self._items, self._tables = integers(tiles), integers(items), integers(tables)
        self._num_partials = num_partials

    def scratch_floats(self, heads: int, head_dim: int) -> int:
        """What `struct` needs for heads of this size."""
        return self._num_partials * heads * (head_dim + _PARTIAL_PADDING)

    def struct(self, scratch: torch.Tensor) -> Any:
        """For the C side, valid while this and the scratch live."""
        return structs.made(
            structs.AttentionPlan,
            tiles=place(self._tiles),
            num_tiles=len(self._tiles) // _TILE_FIELDS,
            items=place(self._items),
            num_items=len(self._items) // _ITEM_FIELDS,
            tables=place(self._tables),
            partials=scratch.data_ptr(),
        )


class FoundLargest:
    """Room for the largest of each row, as of src/largest.h."""

    def __init__(self, rows: int, columns: int) -> None:
        self.parts = (structs.Largest * (rows * -(-columns // _PART_COLUMNS)))()
        self.rows = (structs.Largest * rows)()

    def lists(self) -> tuple[list[float], list[int]]:
        """Values and columns."""
        return [one.value for one in self.rows], [one.column for one in self.rows]


def linear_scratch(rows: int) -> torch.Tensor:
    """For linear layers of so many rows, on each thread: scratch_size in src/linear.h."""
    return torch.empty(torch.get_num_threads(), (_BLOCK_DEPTH + rows) * COLUMNS)


def rounded_row_bytes(depth: int) -> int:
    """Of a row of inputs of dots: a bfloat16, or an int8, a value, and 8 bytes for every 64: RoundedRows in
    src/dots.h."""
    return 2 * depth + depth // DOTS_DEPTH * 8


def rounded_rows(rows: int, depth: int) -> torch.Tensor:
    """Room for the inputs of dots, rounded."""
    return torch.empty(rows * rounded_row_bytes(depth), dtype=torch.uint8)


class Kernels:
    """The functions of one compiled library, of the best instruction set this CPU has (or a named one)."""

    def __init__(self, path: Path, instruction_set: str | None = None) -> None:
        """Raises KernelsUnavailable when the library cannot be loaded."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"cannot load {path}: {error}") from error
        runnable = [s for s in instruction_sets() if s == "baseline" or library[f"cpu_runs_{s}"]()]
        self.instruction_set = instruction_set or runnable[0]
        if self.instruction_set not in runnable:
            raise KernelsUnavailable(f"this CPU does not run {self.instruction_set}")
        self._functions: dict[str, Any] = {}
        for name, argument_types in _SIGNATURES.items():
            function = library[f"{name}_{self.instruction_set}"]
            function.argtypes, function.restype = argument_types, None
            self._functions[name] = function
        self.dots: frozenset[torch.dtype] = _dots(library) if self.instruction_set == "avx512" else frozenset()
        """Types of weights that this CPU multiplies by inputs of the same type, with the instructions for it."""

    def decode(self, model: Any, step: Any) -> None:
        """A whole step: structs.Model and structs.Step, whose tensors the caller keeps; see kernels/decoder.py."""
        self._functions["decode"](model, step, torch.get_num_threads())

    def largest(self, values: torch.Tensor) -> tuple[list[float], list[int]]:
        """As gpu_worker.sampler.FindLargest says, of contiguous float32 values; a step does it by itself."""
        rows, columns = values.shape
        assert values.is_contiguous() and columns
        found = FoundLargest(rows, columns)
        self._functions["largest"](
            values.data_ptr(), rows, columns, found.parts, found.rows, torch.get_num_threads()
        )  # fmt: skip
        return found.lists()

    def draw(self, rows: Sequence[DrawnRow], scratch: torch.Tensor) -> list[int | None]:
        """Implements gpu_worker.sampler.Draw, of rows of one length; scratch: draw_scratch(length)."""
        columns = len(rows[0].logits)
        threads, doubles = draw_scratch_shape(columns)
        assert len(scratch) >= threads and scratch.shape[1] == doubles
        changes = [LogitChanges(row) for row in rows]
        draws = (structs.Draw * len(rows))(*map(draw_struct, rows, changes))
        assert all(row.logits.shape == (columns,) for row in rows)
        tokens = array("q", bytes(8 * len(rows)))
        self._functions["draw"](
            draws, len(rows), columns, scratch.data_ptr(), place(tokens), torch.get_num_threads()
        )  # fmt: skip
        return [None if token < 0 else token for token in tokens]

    def linear(self, x: torch.Tensor, layer: PackedLinear, out: torch.Tensor, *, add: bool = False) -> None:
        """x [rows, depth] → out [rows, columns] = layer(x), or with `add` out += layer(x). Rows may be strided."""
        rows, depth = x.shape
        assert depth == layer.depth and out.shape == (rows, layer.columns) and x.stride(1) == out.stride(1) == 1
        scratch, rounded = linear_scratch(rows), rounded_rows(rows, depth) if layer.is_dots else None
        self._functions["linear"](
            x.data_ptr(), x.stride(0), rows, layer.struct(), out.data_ptr(), out.stride(0), add,
            scratch.data_ptr(), address(rounded), torch.get_num_threads(),
        )  # fmt: skip

    def swiglu(self, x: torch.Tensor, gate: PackedLinear, up: PackedLinear, out: torch.Tensor) -> None:
        """x [rows, depth] → out [rows, columns] = silu(gate(x)) * up(x), https://arxiv.org/abs/2002.05202."""
        rows, depth = x.shape
        assert depth == gate.depth == up.depth and out.shape == (rows, gate.columns) and gate.columns == up.columns
        assert gate.panels.dtype == up.panels.dtype and gate.is_dots == up.is_dots
        scratch, rounded = linear_scratch(rows), rounded_rows(rows, depth) if gate.is_dots else None
        self._functions["swiglu"](
            x.data_ptr(), x.stride(0), rows, gate.struct(), up.struct(), out.data_ptr(), out.stride(0),
            scratch.data_ptr(), address(rounded), torch.get_num_threads(),
        )  # fmt: skip

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """x, out: contiguous [rows, size]; weight [size]."""
        rows, size = x.shape
        assert x.is_contiguous() and out.is_contiguous() and out.shape == x.shape and weight.shape == (size,)
        self._functions["rms_norm"](
            x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, eps, torch.get_num_threads()
        )  # fmt: skip

    def rope_and_write(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        slots: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Norm (if any) and rotate q of qkv in place; write k, so treated, and v to their slots.

        qkv: contiguous [rows, heads + 2 * kv_heads, head_dim]. norms: of q and k, [head_dim] each.
        cos_sin: of every position, [positions, head_dim / 2]. positions, slots: int64 [rows]. pages: K and V of the
        layer, [num_pages, page_size, kv_heads, head_dim].
        """
        rows, all_heads, head_dim = qkv.shape
        kv_heads = pages[0].shape[2]
        assert qkv.is_contiguous() and pages[0].is_contiguous() and cos_sin[0].is_contiguous()
        q_norm, k_norm = norms or (None, None)
        self._functions["rope_and_write"](
            qkv.data_ptr(), address(q_norm), address(k_norm), eps, cos_sin[0].data_ptr(), cos_sin[1].data_ptr(),
            positions.data_ptr(), slots.data_ptr(), pages[0].data_ptr(), pages[1].data_ptr(), rows,
            all_heads - 2 * kv_heads, kv_heads, head_dim, torch.get_num_threads(),
        )  # fmt: skip

    def attend(
        self,
        queries: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention, [num_tokens, heads, head_dim] like `queries`, whose rows may be strided.

        pages: K and V, [num_pages, page_size, kv_heads, head_dim].
        """
        num_tokens, heads, head_dim = queries.shape
        _, page_size, kv_heads, _ = pages[0].shape
        assert head_dim % COLUMNS == 0 and head_dim <= MAX_HEAD_DIM and page_size % COLUMNS == 0
        assert queries.stride()[1:] == (head_dim, 1) and pages[0].is_contiguous() and pages[1].is_contiguous()
        out = torch.empty(num_tokens, heads, head_dim)
        scratch = torch.empty(plan.scratch_floats(heads, head_dim))
        self._functions["attend"](
            queries.data_ptr(), queries.stride(0), pages[0].data_ptr(), pages[1].data_ptr(), out.data_ptr(),
            plan.struct(scratch), page_size, heads, kv_heads, head_dim, window or 0, torch.get_num_threads(),
        )  # fmt: skip
        return out

    def copy_runs(self, to: int, source: int, runs: NDArray[np.int64]) -> None:
        """Implements gpu_worker.transfer.host_pages.CopyRuns, in the calling thread."""
        assert runs.ndim == 2 and runs.shape[1] == 3 and runs.flags.c_contiguous
        self._functions["copy_runs"](to, source, runs.ctypes.data, len(runs))


def _dots(library: ctypes.CDLL) -> frozenset[torch.dtype]:
    able = {torch.bfloat16: library.cpu_dots_bfloat16(), torch.int8: library.cpu_dots_int8()}
    return frozenset(dtype for dtype, is_able in able.items() if is_able)


@lru_cache(maxsize=8)
def load_kernels(cache_dir: Path) -> Kernels | None:
    """The kernels, built if they are not; None where they cannot be, which is logged once, in one line."""
    try:
        return Kernels(library_path(cache_dir))
    except KernelsUnavailable as obstacle:
        log.warning("CPU kernels: %s; torch's own are used", obstacle)
        return None
