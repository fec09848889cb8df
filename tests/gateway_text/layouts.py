"""Small tokenizers in the layouts of the Llama family, each as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12,345 o'clock!\n\n  indented\ttext",
    "def tokenize(text: str) -> list[int]:\n    return [len(word) for word in text.split()]\n",
    "naïve café déjà vu – Straße; 今天天气真的很好，我们去公园玩吧。 Привет, мир! 😀😃",
] * 3

TEXTS = [
    "",
    " ",
    "Hello world",
    " leading and trailing  ",
    "\n\nline\r\n\ttab   three spaces",
    "It's 12,345.67 o'clock – naïve café Straße",
    "今天天气很好 Привет 😀🏳️‍🌈 e\u0301 \u212b",
    "def f(x):\n        return x\n" * 3,
    "<s>inline special</s> and <|im_start|>user\n<|im_end|>",
    "\u2581 a real metaspace character",
    "\x00\x01\x04 control bytes \x7f",
]


def _save(directory: Path, tokenizer: Tokenizer, config: dict[str, Any], model_type: str = "llama") -> Path:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    return directory


def _byte_level(regex: str, special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in special],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


# how Llama 3 and Qwen 2 split words; they differ in how many digits make a number
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + _REST
_QWEN_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + _REST


def llama3_like(directory: Path) -> Path:
    """Byte-level; the post-processor adds a BOS."""
    tokenizer = _byte_level(_LLAMA3_WORDS, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 0)]),
        ]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|eot_id|>",
    }
    return _save(directory, tokenizer, config)


def qwen_like(directory: Path) -> Path:
    """Byte-level with NFC; added tokens, one of them not special, come from tokenizer_config.json alone."""
    tokenizer = _byte_level(_QWEN_WORDS, ["<|endoftext|>"])
    tokenizer.normalizer = normalizers.NFC()
    size = tokenizer.get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = {
        str(size): {"content": "<|im_start|>", "special": True, **flags},
        str(size + 1): {"content": "<|im_end|>", "special": True, **flags},
        str(size + 2): {"content": "<tool_call>", "special": False, **flags},
    }
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    return _save(directory, tokenizer, config, "qwen2")


def _sentencepiece(special: list[str]) -> Tokenizer:
    """BPE over "▁" words with the 256 byte tokens; the caller sets how spaces come and go."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    vocab = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def llama2_like(directory: Path) -> Path:
    """Byte fallback; "▁" put before the text by a normalizer and stripped by the decoder. BOS is on."""
    tokenizer = _sentencepiece(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False, "rstrip": False, "normalized": False},
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    return _save(directory, tokenizer, config)


def metaspace_like(directory: Path) -> Path:
    """Metaspace as pre-tokenizer and decoder; byte tokens are spelt out on the way back."""
    tokenizer = _sentencepiece(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    return _save(directory, tokenizer, config)


LAYOUTS = {"llama2": llama2_like, "llama3": llama3_like, "metaspace": metaspace_like, "qwen": qwen_like}
