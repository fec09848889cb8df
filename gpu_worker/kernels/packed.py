"""A model's weights in the kernels' layout: one mapped file a checkpoint and weight type, shared by the host's workers.

The file is a safetensors file: matrices as panels (library.pack, or pack_dots), q, k and v in one, the scales of int8
panels beside them as NAME.scales; a tied embedding exists only as the head's panels, an untied one in no fewer bits
than bfloat16. Everything else is float32. Small models are packed in memory, and so is any where the cache cannot be
written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.kernels.library import COLUMNS, PackedLinear, dots_panels, pack, pack_dots, pack_scales
from gpu_worker.kernels.locked import locked
from gpu_worker.llama import Attention, CausalLM, DecoderLayer
from gpu_worker.model_config import DecoderConfig
from gpu_worker.weight_dtype import INT8_GROUP, embedding_dtype
from gpu_worker.weights import map_weights, weight_files, weights_revision

log = logging.getLogger("gpu_worker.kernels")

LAYOUT_VERSION = 2
"""Of the file. Count up when what is stored changes."""
SMALL_MODEL_BYTES = 32 << 20
"""A checkpoint below this is packed in memory: a file would save nothing."""
_ALIGNMENT = 64
"""Bytes; every tensor of the file starts on a cache line."""
_PADDING = "padding."
"""What lies between two tensors is a tensor too: the format knows no holes."""
_HEAD_PIECE_ROWS = 4096
"""The head is packed in pieces: it would be the largest temporary by far."""
_FILE_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}

Packed = dict[str, torch.Tensor]
Pieces = Callable[[], Iterator[torch.Tensor]]
"""Makes one tensor, in pieces along its first axis."""


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Pieces

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, slots=True)
class _Layout:
    """Of matrices: the type of their weights, and whether their panels are of dots."""

    stored: torch.dtype
    dots: bool

    @property
    def name(self) -> str:
        return str(self.stored).removeprefix("torch.") + ("-dots" if self.dots else "")

    def panels(self, columns: int, depth: int, pieces: Pieces) -> _Entry:
        """pieces: of the matrix [columns, depth], all but the last of whole panels."""
        if self.dots:
            shape, dtype = dots_panels(columns, depth, self.stored)
            return _Entry(dtype, shape, lambda: (pack_dots(piece, self.stored) for piece in pieces()))
        shape = (-(-columns // COLUMNS), depth, COLUMNS)
        return _Entry(self.stored, shape, lambda: (pack(piece, self.stored) for piece in pieces()))


def load_packed(
    model: CausalLM,
    config: DecoderConfig,
    model_dir: Path,
    stored: torch.dtype,
    cache_dir: Path,
    *,
    dots: bool = False,
) -> Packed:
    """The checkpoint's packed weights by name, matrices as `stored`: float32, bfloat16, or int8 with scales.

    dots: for inputs that are rounded to that type too; every depth is a multiple of 64 then.
    `model` is on the meta device; what is read of it is dropped. Raises ModelUnsupported as load_weights does.
    """
    layout = _Layout(stored, dots)
    path = _packed_path(model_dir, layout, cache_dir)
    if sum(file.stat().st_size for file in weight_files(model_dir)) < SMALL_MODEL_BYTES:
        return _in_memory(model, config, model_dir, layout)
    key = _key(model_dir)
    try:
        if (mapped := _read(path, key)) is None:
            with locked(path):  # of workers that start together one packs, and all map its file
                if (mapped := _read(path, key)) is None:
                    _write(path, key, _packing(model, config, model_dir, layout))
                    mapped = _read(path, key)
    except OSError as error:
        log.warning("packed weights stay in memory, unshared: %s: %s", path, error.strerror)
        return _in_memory(model, config, model_dir, layout)
    assert mapped is not None, f"{path} was just written"
    return mapped


def _packed_path(model_dir: Path, layout: _Layout, cache_dir: Path) -> Path:
    """One file for each checkpoint and layout, so that a changed checkpoint replaces its own.

    Directories that link to the same files are one checkpoint.
    """
    sources = [str(file.resolve()) for file in (model_dir / "config.json", *weight_files(model_dir))]
    digest = hashlib.sha256("\0".join(sources).encode()).hexdigest()[:12]
    name = f"{Path(sources[0]).parent.name}-{digest}-{layout.name}.safetensors"
    return cache_dir / "packed" / name


def _key(model_dir: Path) -> str:
    """What the file was made from. The revision samples the tensors; size and time of the files catch the rest."""
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in weight_files(model_dir)]
    return f"{LAYOUT_VERSION} {weights_revision(model_dir)} {hashlib.sha256(repr(files).encode()).hexdigest()}"


def _read(path: Path, key: str) -> Packed | None:
    """The file's tensors, mapped; None when there is none, or it is of other weights."""
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("key") != key:
                return None
            names = [name for name in file.keys() if not name.startswith(_PADDING)]  # noqa: SIM118  # not a dict
            return {name: file.get_tensor(name) for name in names}
    except (FileNotFoundError, SafetensorError):
        return None


def _in_memory(model: CausalLM, config: DecoderConfig, model_dir: Path, layout: _Layout) -> Packed:
    packing = _packing(model, config, model_dir, layout)
    packed = {name: torch.cat(list(entry.pieces())) for name, entry in packing.items()}
    model.to("meta")
    return packed


def _write(path: Path, key: str, packing: dict[str, _Entry]) -> None:
    """https://github.com/huggingface/safetensors#format; whole or not at all."""
    header: dict[str, object] = {"__metadata__": {"key": key}}
    paddings: list[int] = []
    end = 0
    for name, entry in packing.items():
        start, end = end, end + entry.num_bytes
        header[name] = {"dtype": _FILE_DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": (start, end)}
        paddings.append(-end % _ALIGNMENT)
        if paddings[-1]:
            start, end = end, end + paddings[-1]
            header[_PADDING + name] = {"dtype": "U8", "shape": (end - start,), "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry, padding in zip(packing.values(), paddings, strict=True):
                for piece in entry.pieces():
                    file.write(piece.contiguous().view(torch.uint8).numpy().data)  # numpy has no bfloat16
                file.write(bytes(padding))
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _packing(model: CausalLM, config: DecoderConfig, model_dir: Path, layout: _Layout) -> dict[str, _Entry]:
    """Every packed tensor. Matrices stay as the checkpoint maps them until their piece is made."""
    map_weights(model, model_dir)
    entries: dict[str, _Entry] = {}

    def add_plain(name: str, dtype: torch.dtype, *tensors: torch.Tensor) -> None:
        shape = (sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
        entries[name] = _Entry(dtype, shape, lambda: (tensor.detach().to(dtype) for tensor in tensors))

    def add_panels(name: str, *weights: torch.Tensor, piece_rows: int | None = None) -> None:
        columns, depth = sum(len(weight) for weight in weights), weights[0].shape[1]

        def pieces() -> Iterator[torch.Tensor]:
            return iter(torch.split(torch.cat(weights) if len(weights) > 1 else weights[0], piece_rows or columns))

        entries[name] = layout.panels(columns, depth, pieces)
        if layout.stored is torch.int8:
            shape = (-(-columns // COLUMNS), -(-depth // INT8_GROUP), COLUMNS)
            entries[f"{name}.scales"] = _Entry(torch.float32, shape, lambda: map(pack_scales, pieces()))

    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        for name, linears in _linears(layer).items():
            add_panels(f"{index}.{name}", *(linear.weight for linear in linears))
            if linears[0].bias is not None:
                add_plain(f"{index}.{name}.bias", torch.float32, *(linear.bias for linear in linears))
        for name, weight in _norms(layer).items():
            add_plain(f"{index}.{name}", torch.float32, weight)
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    add_panels("head", head.weight, piece_rows=_HEAD_PIECE_ROWS)
    if model.lm_head is not None:
        add_plain("embedding", embedding_dtype(layout.stored), model.model.embed_tokens.weight)
    add_plain("norm", torch.float32, model.model.norm.weight)
    return entries


def _linears(layer: DecoderLayer) -> dict[str, tuple[torch.nn.Linear, ...]]:
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "qkv": (attention.q_proj, attention.k_proj, attention.v_proj),
        "output": (attention.o_proj,),
        "gate": (mlp.gate_proj,),
        "up": (mlp.up_proj,),
        "down": (mlp.down_proj,),
    }


def _norms(layer: DecoderLayer) -> dict[str, torch.Tensor]:
    attention: Attention = layer.self_attn
    norms = {"attention_norm": layer.input_layernorm.weight, "mlp_norm": layer.post_attention_layernorm.weight}
    if attention.q_norm is not None and attention.k_norm is not None:
        norms |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
    return {name: weight.detach() for name, weight in norms.items()}


def packed_linear(packed: Packed, name: str, columns: int) -> PackedLinear:
    return PackedLinear(packed[name], packed.get(f"{name}.bias"), columns, packed.get(f"{name}.scales"))
