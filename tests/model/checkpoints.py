"""Tiny random checkpoints of every family, as complete Hugging Face directories: weights, tokenizer, chat template.

Every parameter is random, biases and norms among them, so that one read wrongly shows in the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

INIT_STD = 0.15
MAX_POSITIONS = 512
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_mha": ("llama", {"num_key_value_heads": 4}),
    "llama_gqa_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_wide_heads": ("llama", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_linear_rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama3_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_yarn_rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_yarn_all_options": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.2,
                "mscale_all_dim": 0.7,
                "truncate": False,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {**_WINDOWED, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_window": (
        "qwen3",
        {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_biases_yarn": (
        "qwen3",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.3,
            },
        },
    ),
}
"""Named variants: the model type and what it changes in the tiny configuration."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = ["the quick brown fox jumps over the lazy dog", "pack my box with five dozen liquor jugs", "größer, 你好, 🦊"]


def make_checkpoint(
    directory: Path, family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> Path:
    """Write one of FAMILIES (or a bare model type), with more config fields changed; returns the directory."""
    model_type, variant = FAMILIES.get(family, (family, {}))
    config_class = getattr(transformers, f"{_CLASSES[model_type]}Config")
    model_class = getattr(transformers, f"{_CLASSES[model_type]}ForCausalLM")
    fields = _TINY | variant | overrides
    if fields.get("head_dim") is None:
        del fields["head_dim"]
    model = model_class(config_class(**fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * INIT_STD + mean)
    model.to(dtype).save_pretrained(directory)
    write_tokenizer(directory, vocab_size=fields["vocab_size"])
    return directory


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A byte-level BPE with a few merges, and a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tokenizer_config = {"bos_token": END_OF_TEXT, "eos_token": TURN_END, "model_max_length": MAX_POSITIONS}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
