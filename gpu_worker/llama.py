"""The Llama family as one decoder over paged KV: Llama, SmolLM, Mistral, Qwen2, Qwen3.

Modules carry the names of the checkpoints' tensors, so a parameter's path is its name in safetensors.
A step's tokens are one flat row axis; which sequence a row belongs to matters to attention only.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear, silu

from gpu_worker.attention.port import StepAttention
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import DecoderConfig
from gpu_worker.rope import rotate


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Leave it to the checkpoint. torch's random start would import its compiler for meta tensors: 1 s, 70 MB."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """As Linear's."""


class RMSNorm(nn.Module):
    """https://arxiv.org/abs/1910.07467; the mean square is taken in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.window = config.layer_windows[layer]
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = Linear(q_size, config.hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        slots: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        # q: [num_tokens, num_heads, head_dim], k and v: [num_tokens, num_kv_heads, head_dim]
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        kv_cache.write(self.layer, slots, rotate(k, *cos_sin), v)
        attended = attention.attend(rotate(q, *cos_sin), *kv_cache.pages(self.layer), window=self.window)
        output: torch.Tensor = self.o_proj(attended.flatten(1))
        return output


class MLP(nn.Module):
    """SwiGLU, https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self,
        x: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        slots: torch.Tensor,
        attention: StepAttention,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_sin, kv_cache, slots, attention)
        output: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CausalLM(nn.Module):
    """A decoder and its output head; a tied head has no parameter of its own."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        token_ids: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
        kv_cache: KVCache,
        slots: torch.Tensor,
        attention: StepAttention,
        logit_rows: torch.Tensor,
    ) -> torch.Tensor:
        """token_ids, slots: [num_tokens] → float32 logits [len(logit_rows), vocab_size] of those rows."""
        x: torch.Tensor = self.model.embed_tokens(token_ids)
        for layer in self.model.layers:
            x = layer(x, cos_sin, kv_cache, slots, attention)
        x = self.model.norm(x[logit_rows])
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return linear(x, head.weight).float()
