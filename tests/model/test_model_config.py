"""config.json: both layouts read alike; what would change the output is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.model_config import DecoderConfig, load_decoder_config
from gpu_worker.rope_config import DefaultRope, LinearRope, Llama3Rope, YarnRope
from wire.errors import ModelUnsupported

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def load(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> DecoderConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_decoder_config(directory)


@pytest.mark.parametrize(
    ("old", "new", "rope"),
    [
        ({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, DefaultRope(5e5)),
        ({}, None, DefaultRope(1e4)),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}, DefaultRope(5e5)),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
            LinearRope(1e4, 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
            LLAMA3_ROPE | {"rope_theta": 5e5},
            Llama3Rope(5e5, 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": None, "partial_rotary_factor": 1.0},
            YarnRope(1e6, 4.0, 512, 32.0, 1.0, None, None, None, True),
        ),
    ],
)
def test_old_and_new_rope_layouts_read_alike(
    old: dict[str, Any], new: dict[str, Any] | None, rope: object, tmp_path: Path
) -> None:
    assert load(tmp_path, LLAMA | old).rope == rope
    assert load(tmp_path, LLAMA | {"rope_parameters": new}).rope == rope


def test_absent_fields_take_transformers_defaults(tmp_path: Path) -> None:
    optional = {"num_key_value_heads", "rms_norm_eps", "hidden_act"}
    config = load(tmp_path, {name: value for name, value in LLAMA.items() if name not in optional})
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 16, 1e-6)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.tie_word_embeddings) == (False,) * 4
    assert load(tmp_path, QWEN3).head_dim == 128
    assert load(tmp_path, MISTRAL).layer_windows == (4096,) * 4
    qwen2 = load(tmp_path, QWEN2)
    assert (qwen2.qkv_bias, qwen2.output_bias) == (True, False)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (LLAMA, (None, None, None, None)),
        (MISTRAL | {"sliding_window": None}, (None, None, None, None)),
        (MISTRAL | {"sliding_window": 8}, (8, 8, 8, 8)),
        (QWEN2 | {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, (None,) * 4),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}, (None,) * 4),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (None, 8, None, 8),
        ),
    ],
)
def test_layer_windows(config: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert load(tmp_path, config).layer_windows == windows


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 7]}, (5, 7)),
        ({"eos_token_id": [3, 2]}, {"eos_token_id": None}, (3, 2)),
        ({}, {}, ()),
    ],
)
def test_eos_ids_prefer_generation_config(
    config: dict[str, Any], generation: dict[str, Any] | None, ids: tuple[int, ...], tmp_path: Path
) -> None:
    assert load(tmp_path, LLAMA | config, generation).eos_token_ids == ids


def test_yarn_extends_the_context_limit(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert load(tmp_path, LLAMA).context_limit == 512
    assert load(tmp_path, LLAMA | {"rope_scaling": yarn}).context_limit == 2048


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "architectures=['MixtralForCausalLM']"),
        ({"architectures": None}, "architectures"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "architectures"),
        ({"model_type": "granite"}, "model_type='granite'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ({"auto_map": {"AutoModel": "modeling.py"}}, "auto_map"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"a_field_nobody_knows": 0}, "a_field_nobody_knows=0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast=3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 1.0}}, "high_freq_factor=1.0"),
        ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, "mrope_section"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 1e4}}, "rope_param"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_scaling": "linear"}, "rope_scaling='linear'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"attention_bias": "yes"}, "attention_bias='yes'"),
        ({"rms_norm_eps": -1}, "rms_norm_eps=-1"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported) as refusal:
        load(tmp_path, LLAMA | changes)
    assert named in refusal.value.message


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MISTRAL | {"attention_bias": True}, "attention_bias"),
        (QWEN2 | {"mlp_bias": True}, "mlp_bias"),
        (QWEN2 | {"num_key_value_heads": None}, "num_key_value_heads is missing"),
        (QWEN3 | {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}, "layer_types"),
        (QWEN3 | {"layer_types": ["linear_attention"] * 4}, "'linear_attention'"),
        (QWEN2 | {"use_sliding_window": True, "max_window_layers": "all"}, "max_window_layers='all'"),
    ],
)
def test_each_family_refuses_what_it_does_not_have(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported) as refusal:
        load(tmp_path, config)
    assert named in refusal.value.message


def test_harmless_and_switched_off_fields_pass(tmp_path: Path) -> None:
    extras = {
        "torch_dtype": "bfloat16",
        "pretraining_tp": 1,
        "is_llama_config": True,
        "rope_interleaved": False,
        "quantization_config": None,
        "pruned_heads": {},
        "transformers.js_config": {"kv_cache_dtype": {}},
    }
    assert load(tmp_path, LLAMA | extras) == load(tmp_path, LLAMA)


@pytest.mark.parametrize("text", ["", "[]", "{'a': 1}"])
def test_a_broken_config_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelUnsupported, match=r"config\.json"):
        load_decoder_config(tmp_path)
