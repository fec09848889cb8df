"""The Llama family's forward pass over the CPU kernels: gpu_worker/llama.py's CausalLM with packed weights.

A layer is eight calls. The residual stream is added to in place by the two matrices that end in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gpu_worker.attention.port import StepAttention
from gpu_worker.kernels.library import COLUMNS, Kernels, PackedLinear
from gpu_worker.kernels.packed import Packed, packed_linear
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import DecoderConfig


@dataclass(frozen=True, slots=True)
class _Layer:
    window: int | None
    attention_norm: torch.Tensor  # [hidden]
    qkv: PackedLinear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None  # [head_dim] each
    output: PackedLinear
    mlp_norm: torch.Tensor  # [hidden]
    gate: PackedLinear
    up: PackedLinear
    down: PackedLinear


class PackedCausalLM:
    def __init__(self, config: DecoderConfig, packed: Packed, kernels: Kernels) -> None:
        self._config = config
        self._kernels = kernels
        self._layers = [_layer(config, packed, index) for index in range(config.num_layers)]
        self._norm = packed["norm"]
        self._head = packed_linear(packed, "head", config.vocab_size)
        self._embedding = packed.get("embedding")

    def __call__(
        self,
        token_ids: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        slots: torch.Tensor,
        attention: StepAttention,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids, slots: [num_tokens] → float32 logits [len(logit_rows), vocab_size] of those rows."""
        k, config, eps = self._kernels, self._config, self._config.rms_norm_eps
        x = self._embed(token_ids)
        normed = torch.empty_like(x)
        qkv = x.new_empty(len(x), config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        qkv_rows, queries = qkv.flatten(1), qkv[:, : config.num_heads]
        hidden = x.new_empty(len(x), config.intermediate_size)
        for index, layer in enumerate(self._layers):
            pages = kv_cache.pages(index)
            k.rms_norm(x, layer.attention_norm, eps, normed)
            k.linear(normed, layer.qkv, qkv_rows)
            k.rope_and_write(qkv, layer.qk_norms, eps, cos_sin, slots, pages)
            attended = attention.attend(queries, *pages, window=layer.window)
            k.linear(attended.flatten(1), layer.output, x, add=True)
            k.rms_norm(x, layer.mlp_norm, eps, normed)
            k.swiglu(normed, layer.gate, layer.up, hidden)
            k.linear(hidden, layer.down, x, add=True)
        x = x[logit_rows]
        normed = torch.empty_like(x)
        k.rms_norm(x, self._norm, eps, normed)
        logits = x.new_empty(len(x), config.vocab_size)
        k.linear(normed, self._head, logits)
        return logits

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] → [num_tokens, hidden]; of a tied head, a token's row is one column of a panel."""
        if self._embedding is not None:
            return self._embedding[token_ids]
        return self._head.panels[token_ids // COLUMNS, :, token_ids % COLUMNS].contiguous()


def _layer(config: DecoderConfig, packed: Packed, index: int) -> _Layer:
    def linear(name: str, columns: int) -> PackedLinear:
        return packed_linear(packed, f"{index}.{name}", columns)

    q_norm, k_norm = packed.get(f"{index}.q_norm"), packed.get(f"{index}.k_norm")
    return _Layer(
        window=config.layer_windows[index],
        attention_norm=packed[f"{index}.attention_norm"],
        qkv=linear("qkv", (config.num_heads + 2 * config.num_kv_heads) * config.head_dim),
        qk_norms=None if q_norm is None or k_norm is None else (q_norm, k_norm),
        output=linear("output", config.hidden_size),
        mlp_norm=packed[f"{index}.mlp_norm"],
        gate=linear("gate", config.intermediate_size),
        up=linear("up", config.intermediate_size),
        down=linear("down", config.hidden_size),
    )
