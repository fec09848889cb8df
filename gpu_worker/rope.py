"""Rotary position embedding (https://arxiv.org/abs/2104.09864) and its scaled kinds, as transformers computes them."""

from __future__ import annotations

import math
from typing import assert_never

import torch

from gpu_worker.rope_config import DefaultRope, LinearRope, Llama3Rope, RopeConfig, YarnRope


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Radians per position, float32 [head_dim / 2], and the scale of cos and sin."""
    dims = torch.arange(0, head_dim, 2, dtype=torch.float32)
    wavelengths = rope.theta ** (dims / head_dim)  # positions per radian
    match rope:
        case DefaultRope():
            return 1.0 / wavelengths, 1.0
        case LinearRope():
            return (1.0 / wavelengths) / rope.factor, 1.0
        case Llama3Rope():
            return _llama3(rope, 1.0 / wavelengths), 1.0
        case YarnRope():
            return _yarn(rope, wavelengths, head_dim), _yarn_attention_scale(rope)
        case _:
            assert_never(rope)


def _llama3(rope: Llama3Rope, inv_freq: torch.Tensor) -> torch.Tensor:
    original = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    # wavelength | < original/high kept | ramp | > original/low divided by factor |
    kept_share = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = (1 - kept_share) * inv_freq / rope.factor + kept_share * inv_freq
    scaled = torch.where(wavelength < original / rope.high_freq_factor, inv_freq, ramp)
    return torch.where(wavelength > original / rope.low_freq_factor, inv_freq / rope.factor, scaled)


def _yarn(rope: YarnRope, wavelengths: torch.Tensor, head_dim: int) -> torch.Tensor:
    """§3.2 of the paper: dims that turn often are kept, those that turn rarely are interpolated."""

    def dim_of(rotations: float) -> float:
        """The dim that makes this many turns over the original context."""
        turns = math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
        return head_dim * turns / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    interpolated = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - interpolated
    return (1.0 / (rope.factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept


def _yarn_attention_scale(rope: YarnRope) -> float:
    """§3.3 of the paper, and DeepSeek's quotient of two such scales."""

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


class RotaryEmbedding:
    """cos and sin of positions, used by every layer."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self.head_dim = head_dim
        inv_freq, self._scale = inverse_frequencies(rope, head_dim)
        self._inv_freq = inv_freq.to(device)

    def cos_sin(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """positions [num_tokens] → cos, sin [num_tokens, 1, head_dim / 2]; angles are computed in float32."""
        angles = (positions.float()[:, None] * self._inv_freq)[:, None]
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)


class RotaryTable:
    """cos and sin by position, on the CPU in float32, as far as steps have come."""

    POSITIONS_AT_ONCE = 4096
    """Computed together: a position's bits do not depend on how far the table reaches."""

    def __init__(self, embedding: RotaryEmbedding) -> None:
        self._embedding = embedding
        self._cos = self._sin = torch.empty(0, embedding.head_dim // 2)

    def reach(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos, sin [at least `positions`, head_dim / 2]."""
        known = len(self._cos)
        if known < positions:
            more = [
                self._embedding.cos_sin(torch.arange(start, start + self.POSITIONS_AT_ONCE), torch.float32)
                for start in range(known, positions, self.POSITIONS_AT_ONCE)
            ]
            self._cos = torch.cat([self._cos, *(cos.flatten(1) for cos, _ in more)])
            self._sin = torch.cat([self._sin, *(sin.flatten(1) for _, sin in more)])
        return self._cos, self._sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [num_tokens, heads, head_dim], whose dims i and i + head_dim / 2 are a pair."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
