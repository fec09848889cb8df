"""A model's weights in the kernels' layout: one mapped file a checkpoint, whose pages the host's workers share.

The file is a safetensors file: matrices as panels (library.pack), q, k and v in one; a tied embedding exists only as
the head's panels. Small models are packed in memory, and so is any where the cache directory cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from gpu_worker.kernels.library import COLUMNS, PackedLinear, pack
from gpu_worker.kernels.locked import locked
from gpu_worker.llama import Attention, CausalLM, DecoderLayer
from gpu_worker.model_config import DecoderConfig
from gpu_worker.weights import load_weights, weight_files, weights_revision

log = logging.getLogger("gpu_worker.kernels")

LAYOUT_VERSION = 1
"""Of the file. Count up when what is stored changes."""
SMALL_MODEL_BYTES = 32 << 20
"""A checkpoint below this is packed in memory: a file would save nothing."""
_ALIGNMENT = 64
_HEAD_PIECE_ROWS = 4096
"""The head is packed in pieces: it would be the largest temporary by far."""

Packed = dict[str, torch.Tensor]
Pieces = Callable[[], Iterator[torch.Tensor]]
"""Makes one tensor, in pieces along its first axis."""


def load_packed(model: CausalLM, config: DecoderConfig, model_dir: Path, cache_dir: Path) -> Packed:
    """The checkpoint's packed weights by name, float32. `model` is on the meta device; what is read of it is dropped.

    Raises ModelUnsupported as load_weights does.
    """
    path = _packed_path(model_dir, cache_dir)
    if sum(file.stat().st_size for file in weight_files(model_dir)) < SMALL_MODEL_BYTES:
        return _in_memory(model, config, model_dir)
    key = _key(model_dir)
    try:
        if (mapped := _read(path, key)) is None:
            with locked(path):  # of workers that start together one packs, and all map its file
                if (mapped := _read(path, key)) is None:
                    _write(path, key, _packing(model, config, model_dir))
                    mapped = _read(path, key)
    except OSError as error:
        log.warning("packed weights stay in memory, unshared: %s: %s", path, error.strerror)
        return _in_memory(model, config, model_dir)
    assert mapped is not None, f"{path} was just written"
    return mapped


def _packed_path(model_dir: Path, cache_dir: Path) -> Path:
    """One file for each directory, so that a changed checkpoint replaces its own."""
    directory = model_dir.resolve()
    digest = hashlib.sha256(str(directory).encode()).hexdigest()[:12]
    return cache_dir / "packed" / f"{directory.name}-{digest}.safetensors"


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
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (FileNotFoundError, SafetensorError):
        return None


def _in_memory(model: CausalLM, config: DecoderConfig, model_dir: Path) -> Packed:
    packing = _packing(model, config, model_dir)
    packed = {name: torch.cat(list(pieces())) for name, (_, pieces) in packing.items()}
    model.to("meta")
    return packed


def _write(path: Path, key: str, packing: dict[str, tuple[tuple[int, ...], Pieces]]) -> None:
    """https://github.com/huggingface/safetensors#format; whole or not at all."""
    header: dict[str, object] = {"__metadata__": {"key": key}}
    end = 0
    for name, (shape, _) in packing.items():
        start, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, pieces in packing.values():
                for piece in pieces():
                    file.write(piece.contiguous().numpy().data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _packing(model: CausalLM, config: DecoderConfig, model_dir: Path) -> dict[str, tuple[tuple[int, ...], Pieces]]:
    """Every packed tensor's shape and maker. Panels come first, so that they start on cache lines."""
    load_weights(model, model_dir, "float32", torch.device("cpu"))
    panels: dict[str, tuple[tuple[int, ...], Pieces]] = {}
    plain: dict[str, torch.Tensor] = {"norm": model.model.norm.weight}

    def add_panels(name: str, *weights: torch.Tensor, piece_rows: int | None = None) -> None:
        columns, depth = sum(len(weight) for weight in weights), weights[0].shape[1]

        def pieces() -> Iterator[torch.Tensor]:
            whole = weights[0] if len(weights) == 1 else torch.cat(weights)
            yield from map(pack, torch.split(whole, piece_rows or columns))

        panels[name] = (-(-columns // COLUMNS), depth, COLUMNS), pieces

    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        for name, linears in _linears(layer).items():
            add_panels(f"{index}.{name}", *(linear.weight for linear in linears))
            if linears[0].bias is not None:
                plain[f"{index}.{name}.bias"] = torch.cat([linear.bias for linear in linears])
        plain |= {f"{index}.{name}": weight for name, weight in _norms(layer).items()}
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    add_panels("head", head.weight, piece_rows=_HEAD_PIECE_ROWS)
    if model.lm_head is not None:
        plain["embedding"] = model.model.embed_tokens.weight

    def one(tensor: torch.Tensor) -> Pieces:
        return lambda: iter([tensor.detach()])

    return panels | {name: (tuple(tensor.shape), one(tensor)) for name, tensor in plain.items()}


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
    return PackedLinear(packed[name], packed.get(f"{name}.bias"), columns)
