"""The Llama family's forward pass over the CPU kernels: gpu_worker/llama.py's CausalLM with packed weights.

A step is one call (src/decoder.h); here its arguments are put together.
"""

from __future__ import annotations

from typing import Any

import torch

from gpu_worker.attention.cpu_backend import CpuStepAttention
from gpu_worker.attention.port import StepAttention
from gpu_worker.kernels import structs
from gpu_worker.kernels.library import Kernels, linear_scratch, rounded_rows
from gpu_worker.kernels.packed import Packed, packed_linear
from gpu_worker.kernels.structs import address, made
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import DecoderConfig


class PackedCausalLM:
    def __init__(self, config: DecoderConfig, packed: Packed, kernels: Kernels) -> None:
        self._config = config
        self._kernels = kernels
        self._packed = packed
        self._model: Any = None
        self._kv_cache: KVCache | None = None
        self._is_dots = packed_linear(packed, "head", config.vocab_size).is_dots
        self._workspace = _Workspace(config, rows=0, is_dots=self._is_dots)

    def __call__(
        self,
        token_ids: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        slots: torch.Tensor,
        attention: StepAttention,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids, slots: [num_tokens] → float32 logits [len(logit_rows), vocab_size] of those rows, ascending."""
        assert isinstance(attention, CpuStepAttention), "the kernels attend by themselves"
        if kv_cache is not self._kv_cache:
            self._model, self._kv_cache = _model(self._config, self._packed, kv_cache), kv_cache
        if not self._workspace.serves(len(token_ids)):
            self._workspace = _Workspace(self._config, rows=len(token_ids), is_dots=self._is_dots)
        logits = torch.empty(len(logit_rows), self._config.vocab_size)
        step = made(
            structs.Step,
            rows=len(token_ids),
            token_ids=token_ids.data_ptr(),
            slots=slots.data_ptr(),
            cos=cos_sin[0].data_ptr(),
            sin=cos_sin[1].data_ptr(),
            attention=attention.plan.struct(self._config.num_heads, self._config.head_dim),
            logit_rows=logit_rows.data_ptr(),
            num_logit_rows=len(logit_rows),
            logits=logits.data_ptr(),
            workspace=self._workspace.struct,
        )
        self._kernels.decode(self._model, step)
        return logits


class _Workspace:
    """Activations of a step of up to `rows` rows: kept, since new memory costs more than it holds."""

    def __init__(self, config: DecoderConfig, rows: int, *, is_dots: bool) -> None:
        self._rows = rows
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._tensors = {
            "x": torch.empty(rows, config.hidden_size),
            "normed": torch.empty(rows, config.hidden_size),
            "qkv": torch.empty(rows, (heads + 2 * kv_heads) * head_dim),
            "attended": torch.empty(rows, heads * head_dim),
            "inner": torch.empty(rows, config.intermediate_size),
            "scratch": linear_scratch(rows),
            "rounded": rounded_rows(rows, max(config.linear_depths)) if is_dots else None,
        }
        self._threads = torch.get_num_threads()
        pointers = {name: address(tensor) for name, tensor in self._tensors.items()}
        self.struct = made(structs.Workspace, **pointers)

    def serves(self, rows: int) -> bool:
        return rows <= self._rows and torch.get_num_threads() <= self._threads


def _model(config: DecoderConfig, packed: Packed, kv_cache: KVCache) -> Any:
    """Lives as long as `packed` and `kv_cache`, whose addresses it holds."""
    embedding = packed.get("embedding")
    return made(
        structs.Model,
        layers=(structs.Layer * config.num_layers)(
            *(_layer(config, packed, kv_cache, index) for index in range(config.num_layers))
        ),
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=kv_cache.layout.page_size,
        eps=config.rms_norm_eps,
        norm=packed["norm"].data_ptr(),
        head=packed_linear(packed, "head", config.vocab_size).struct(),
        embedding=address(embedding),
        embedding_stored=0 if embedding is None else structs.STORED[embedding.dtype],
    )


def _layer(config: DecoderConfig, packed: Packed, kv_cache: KVCache, index: int) -> Any:
    def linear(name: str, columns: int) -> Any:
        return packed_linear(packed, f"{index}.{name}", columns).struct()

    keys, values = kv_cache.pages(index)
    return made(
        structs.Layer,
        attention_norm=packed[f"{index}.attention_norm"].data_ptr(),
        mlp_norm=packed[f"{index}.mlp_norm"].data_ptr(),
        q_norm=address(packed.get(f"{index}.q_norm")),
        k_norm=address(packed.get(f"{index}.k_norm")),
        qkv=linear("qkv", (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
        output=linear("output", config.hidden_size),
        gate=linear("gate", config.intermediate_size),
        up=linear("up", config.intermediate_size),
        down=linear("down", config.hidden_size),
        window=config.layer_windows[index] or 0,
        keys=keys.data_ptr(),
        values=values.data_ptr(),
    )
