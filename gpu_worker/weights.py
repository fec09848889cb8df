"""A checkpoint's tensors, mapped from safetensors files instead of read: workers on one host share the pages.

Format: https://github.com/huggingface/safetensors#format (8 bytes header length, JSON header, tensor data).
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from gpu_worker.config_fields import ConfigFields
from gpu_worker.weight_dtype import WeightDtype, embedding_dtype, rounded
from wire.errors import ModelUnsupported

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SAMPLE_BYTES = 1024
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MATRIX_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16}
# Early Llama checkpoints store what rope.py computes.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def weight_files(model_dir: Path) -> list[Path]:
    """The one file, or the index's shards, by name. Raises ModelUnsupported naming a file that is missing."""
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    if not (model_dir / INDEX_FILE).is_file():
        raise ModelUnsupported(f"{model_dir}: neither {SINGLE_FILE} nor {INDEX_FILE}", param=SINGLE_FILE)
    index = ConfigFields.read(model_dir / INDEX_FILE)
    weight_map = index.values.get("weight_map")
    if not isinstance(weight_map, dict):
        raise index.refuse("weight_map", "not an object")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not (model_dir / name).is_file():
            raise ModelUnsupported(f"{model_dir}: {name}, named by {INDEX_FILE}, is missing", param=name)
    return [model_dir / name for name in names]


def map_tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by name, backed by its file. Raises ModelUnsupported for a broken file."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as shard:
                tensors.update((name, shard.get_tensor(name)) for name in shard.keys())  # noqa: SIM118  # not a dict
        except (SafetensorError, OSError) as error:
            raise ModelUnsupported(f"{path}: {error}", param=path.name) from error
    return tensors


def checkpoint_dtype(model_dir: Path) -> torch.dtype:
    """The type that holds every matrix of the checkpoint exactly. Raises ModelUnsupported for a broken file.

    A tensor of another kind than the three float types is load_weights' to refuse.
    """
    found: set[torch.dtype] = set()
    for path in weight_files(model_dir):
        try:
            with safe_open(path, framework="pt") as shard:
                slices = [shard.get_slice(name) for name in shard.keys()]  # noqa: SIM118  # not a dict
                found |= {_MATRIX_DTYPES.get(s.get_dtype(), torch.float32) for s in slices if len(s.get_shape()) == 2}
        except (SafetensorError, OSError) as error:
            raise ModelUnsupported(f"{path}: {error}", param=path.name) from error
    return found.pop() if len(found) == 1 else torch.float32


def load_weights(model: nn.Module, model_dir: Path, weights: WeightDtype, device: torch.device) -> None:
    """Give a model made on the meta device its parameters, in the type it computes in.

    A tensor that already has the type and device stays mapped; others are converted one by one. Values of a narrower
    stored type are rounded to that first. Raises ModelUnsupported as checked_tensors does.
    """
    tensors = checked_tensors(model, model_dir)
    is_rounded = weights.stored is not weights.compute
    for name, tensor in tensors.items():
        if is_rounded and tensor.dim() == 2:
            is_looked_up = name == EMBEDDING and HEAD in tensors
            tensor = rounded(tensor, embedding_dtype(weights.stored) if is_looked_up else weights.stored)
        # One norm that stays mapped would keep all of the file's pages that were read.
        tensors[name] = tensor.to(device, weights.compute, copy=is_rounded and tensor.dim() < 2)
    model.load_state_dict(tensors, assign=True)
    model.requires_grad_(False)


def map_weights(model: nn.Module, model_dir: Path) -> None:
    """Give a model made on the meta device its parameters as the checkpoint stores them, mapped, of mixed types.

    Raises ModelUnsupported as checked_tensors does.
    """
    model.load_state_dict(checked_tensors(model, model_dir), assign=True)
    model.requires_grad_(False)


def checked_tensors(model: nn.Module, model_dir: Path) -> dict[str, torch.Tensor]:
    """The checkpoint's mapped tensors, exactly those the model has.

    Raises ModelUnsupported naming a tensor that is missing, unexpected, or of a wrong shape or type.
    """
    tensors = map_tensors(model_dir)
    expected = model.state_dict()
    _check_tied_head(tensors, expected)
    for name in sorted(expected.keys() - tensors.keys()):
        raise ModelUnsupported(f"{model_dir}: tensor {name} is missing", param=name)
    for name in sorted(tensors.keys() - expected.keys()):
        if _DERIVED.fullmatch(name):
            del tensors[name]
            continue
        raise ModelUnsupported(f"{model_dir}: unexpected tensor {name}", param=name)
    for name, tensor in tensors.items():
        wanted = tuple(expected[name].shape)
        if tuple(tensor.shape) != wanted:
            raise ModelUnsupported(f"{model_dir}: {name} has shape {tuple(tensor.shape)}, not {wanted}", param=name)
        if tensor.dtype not in _FLOAT_DTYPES:
            raise ModelUnsupported(f"{model_dir}: {name} is {tensor.dtype}, which is not implemented", param=name)
    return tensors


def _check_tied_head(tensors: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    """A tied checkpoint may repeat the embedding as its head; a different head contradicts the config."""
    if HEAD in expected or HEAD not in tensors:
        return
    embedding = tensors.get(EMBEDDING)
    if embedding is not None and torch.equal(embedding, tensors[HEAD]):
        del tensors[HEAD]
        return
    raise ModelUnsupported(
        f"{HEAD} differs from {EMBEDDING}, but config.json says tie_word_embeddings",
        param=HEAD,
    )


def served_revision(model_dir: Path, rounding: str | None) -> str:
    """weights_revision of weights that are served as they are; of rounded ones, or with rounded inputs, another.

    Workers of two such revisions compute different KV: neither serves one cell nor shares a prefix with the other.
    """
    revision = weights_revision(model_dir)
    if rounding is None:
        return revision
    return f"{hashlib.sha256(f'{revision} {rounding}'.encode()).hexdigest()}-{rounding}"


def weights_revision(model_dir: Path) -> str:
    """A digest (hex) of config, tensor layout and samples of every tensor: cheap, and equal on every machine.

    It tells checkpoints apart; it does not prove that two files are equal byte for byte.
    """
    digest = hashlib.sha256((model_dir / "config.json").read_bytes())
    for path in weight_files(model_dir):
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if header_size > _MAX_HEADER_BYTES:
                raise ModelUnsupported(f"{path}: not a safetensors file", param=path.name)
            header = file.read(header_size)
            digest.update(header)
            for start, end in _tensor_spans(header, path):
                for offset in (start, (start + end) // 2, max(start, end - _SAMPLE_BYTES)):
                    file.seek(8 + header_size + offset)
                    digest.update(file.read(min(_SAMPLE_BYTES, end - offset)))
    return digest.hexdigest()


def _tensor_spans(header: bytes, path: Path) -> list[tuple[int, int]]:
    """[start, end) of each tensor's bytes, counted from the end of the header."""
    try:
        entries = json.loads(header)
        return sorted(tuple(entry["data_offsets"]) for name, entry in entries.items() if name != "__metadata__")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelUnsupported(f"{path}: not a safetensors file", param=path.name) from error
