"""What a checkpoint says about its rotary embedding. gpu_worker/rope.py computes with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from gpu_worker.config_fields import ConfigFields
from wire.errors import ModelUnsupported

DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class DefaultRope:
    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Long wavelengths divided by `factor`, short ones kept, a ramp between (Llama 3.1)."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN, https://arxiv.org/abs/2309.00071."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    """Scale of cos and sin; None: from `factor` and the two mscales."""
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


RopeConfig: TypeAlias = DefaultRope | LinearRope | Llama3Rope | YarnRope

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_LINEAR = _COMMON | {"factor"}
_LLAMA3 = _LINEAR | {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_YARN = _LINEAR | {
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}


def read_rope(config: ConfigFields, max_position_embeddings: int) -> RopeConfig:
    """Both layouts: `rope_theta` beside `rope_scaling`, and transformers 5's one `rope_parameters`.

    Raises ModelUnsupported naming the field for any other rope type, or for a key that type does not have.
    """
    rope = _rope_object(config)
    rope.require("partial_rotary_factor", only=1.0)
    theta = rope.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    match rope.values.get("rope_type", rope.values.get("type", "default")):
        case "default":
            rope.reject_unknown(_COMMON)
            return DefaultRope(theta)
        case "linear":
            rope.reject_unknown(_LINEAR)
            return LinearRope(theta, rope.number("factor"))
        case "llama3":
            return _read_llama3(rope, theta, max_position_embeddings)
        case "yarn":
            return _read_yarn(rope, theta, max_position_embeddings)
        case other:
            raise ModelUnsupported(f"{rope.where}: rope_type={other!r} is not implemented", param="rope_type")


def _read_llama3(rope: ConfigFields, theta: float, max_position_embeddings: int) -> Llama3Rope:
    rope.reject_unknown(_LLAMA3)
    low_freq_factor, high_freq_factor = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high_freq_factor <= low_freq_factor:
        raise rope.refuse("high_freq_factor", f"not above low_freq_factor={low_freq_factor}")
    return Llama3Rope(
        theta,
        factor=rope.number("factor"),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        # transformers, too, takes the whole length for the original one when nothing is said.
        original_max_position_embeddings=rope.integer("original_max_position_embeddings", max_position_embeddings),
    )


def _read_yarn(rope: ConfigFields, theta: float, max_position_embeddings: int) -> YarnRope:
    rope.reject_unknown(_YARN)
    original = rope.integer("original_max_position_embeddings", max_position_embeddings)
    return YarnRope(
        theta,
        factor=rope.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.boolean("truncate", True),
    )


def _rope_object(config: ConfigFields) -> ConfigFields:
    name = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    values = config.values.get(name) or {}
    if not isinstance(values, dict):
        raise config.refuse(name, "not an object")
    if name == "rope_scaling" and config.values.get("rope_parameters") not in (None, {}, values):
        raise config.refuse("rope_parameters", "contradicts rope_scaling")
    return ConfigFields(values, f"{config.where}: {name}")
