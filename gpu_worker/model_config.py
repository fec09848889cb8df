"""config.json and generation_config.json of a Hugging Face directory as one frozen record.

Anything that would change the model's output and is not implemented is refused by name; nothing is ignored
except what gpu_worker/known_fields.py lists as harmless. Defaults of absent fields are those of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpu_worker.config_fields import ConfigFields
from gpu_worker.known_fields import COMMON_FIELDS, HARMLESS_FIELDS
from gpu_worker.rope_config import RopeConfig, YarnRope, read_rope
from wire.errors import ConfigInvalid


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A Llama-family decoder. Sizes in elements, lengths in tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    """Bias of the attention output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each head's q and k, before the rotation."""
    layer_windows: tuple[int | None, ...]
    """[num_layers] positions a query sees, its own included; None sees all."""
    eos_token_ids: tuple[int, ...]

    @property
    def linear_depths(self) -> tuple[int, ...]:
        """Inputs of every linear layer: of a hidden state, of the heads' outputs, of the MLP's inner state."""
        return self.hidden_size, self.num_heads * self.head_dim, self.intermediate_size

    @property
    def context_limit(self) -> int:
        """Most positions the rotary embedding is meant for."""
        if isinstance(self.rope, YarnRope):
            scaled = int(self.rope.original_max_position_embeddings * self.rope.factor)
            return max(self.max_position_embeddings, scaled)
        return self.max_position_embeddings


@dataclass(frozen=True, slots=True)
class _Family:
    model_type: str
    fields: frozenset[str]
    """What its config.json has beyond COMMON_FIELDS."""


_WINDOW_FIELDS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})
_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", frozenset({"attention_bias", "mlp_bias"})),
    "MistralForCausalLM": _Family("mistral", frozenset({"sliding_window"})),
    "Qwen2ForCausalLM": _Family("qwen2", _WINDOW_FIELDS),
    "Qwen3ForCausalLM": _Family("qwen3", _WINDOW_FIELDS | {"attention_bias"}),
}


def load_decoder_config(model_dir: Path) -> DecoderConfig:
    """Read and check a model directory's configuration. Raises ModelUnsupported naming the field."""
    config = ConfigFields.read(model_dir / "config.json")
    architecture, family = _family(config)
    config.reject_unknown(COMMON_FIELDS | family.fields | HARMLESS_FIELDS)
    config.require("model_type", only=family.model_type)
    config.require("hidden_act", only="silu")
    config.require("partial_rotary_factor", only=1.0)

    num_layers = config.integer("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    # transformers gives only Llama a rule for an absent count of KV heads; the others' class defaults fit one model.
    num_kv_heads = config.integer("num_key_value_heads", num_heads if family.model_type == "llama" else None)
    if num_heads % num_kv_heads:
        raise config.refuse("num_key_value_heads", f"does not divide num_attention_heads={num_heads}")
    hidden_size = config.integer("hidden_size")
    head_dim = config.integer("head_dim", 128 if family.model_type == "qwen3" else hidden_size // num_heads)
    if head_dim % 2:
        raise config.refuse("head_dim", f"rotary embedding needs an even head dimension, not {head_dim}")
    max_position_embeddings = config.integer("max_position_embeddings")
    attention_bias = config.boolean("attention_bias", False)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=read_rope(config, max_position_embeddings),
        tie_word_embeddings=config.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias or family.model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=config.boolean("mlp_bias", False),
        qk_norm=family.model_type == "qwen3",
        layer_windows=_layer_windows(config, family, num_layers),
        eos_token_ids=_eos_token_ids(config, model_dir),
    )


def context_limit(config: DecoderConfig, max_model_len: int | None) -> int:
    """Prompt and output tokens of a sequence at most: max_model_len, None for the model's own limit.

    Raises ConfigInvalid when it is beyond that.
    """
    if max_model_len is None:
        return config.context_limit
    if max_model_len > config.context_limit:
        raise ConfigInvalid(
            f"PHASEMESH_MAX_MODEL_LEN={max_model_len}: the model is meant for at most {config.context_limit} tokens",
            param="PHASEMESH_MAX_MODEL_LEN",
        )
    return max_model_len


def _family(config: ConfigFields) -> tuple[str, _Family]:
    match config.values.get("architectures"):
        case [str(architecture)] if architecture in _FAMILIES:
            return architecture, _FAMILIES[architecture]
        case _:
            raise config.refuse("architectures", f"implemented: {', '.join(_FAMILIES)}")


def _layer_windows(config: ConfigFields, family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """Which layers see a sliding window, by each family's own rule; absent fields as in transformers' classes."""
    if "sliding_window" not in family.fields:
        return (None,) * num_layers
    window = None
    if config.values.get("sliding_window", 4096) is not None:
        window = config.integer("sliding_window", 4096)
    if family.model_type == "mistral":
        return (window,) * num_layers

    if not config.boolean("use_sliding_window", False):
        window = None
    layer_types = config.values.get("layer_types")
    if layer_types is None:
        first_windowed = config.values.get("max_window_layers", 28)
        if isinstance(first_windowed, bool) or not isinstance(first_windowed, int):
            raise config.refuse("max_window_layers", "not an integer")
        return tuple(window if layer >= first_windowed else None for layer in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.refuse("layer_types", f"not a list of {num_layers}")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise config.refuse("layer_types", f"{layer_type!r} is not implemented")
        if layer_type == "sliding_attention" and window is None:
            raise config.refuse("layer_types", "sliding_attention without use_sliding_window and sliding_window")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _eos_token_ids(config: ConfigFields, model_dir: Path) -> tuple[int, ...]:
    """generation_config.json's, else config.json's: chat models often name more end tokens in the former."""
    source = config
    generation_path = model_dir / "generation_config.json"
    if generation_path.is_file():
        generation = ConfigFields.read(generation_path)
        if generation.values.get("eos_token_id") is not None:
            source = generation
    value = source.values.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise source.refuse("eos_token_id", "not a token id or a list of them")
    return tuple(ids)
