"""Text → token ids as transformers' AutoTokenizer gives them, and each token's own bytes for the way back.

Two layouts exist in the Llama family, told apart by tokenizer.json's decoder:

    byte-level BPE (SmolLM, Llama 3, Qwen, Mistral Tekken): each character of a token is one byte ("Ġ" is 0x20)
    SentencePiece (Llama 2, Mistral): "▁" is a space, "<0x0A>" is the byte 0x0A, the text gets a leading space
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import tokenizers

from wire.errors import InvalidRequest, ModelUnsupported

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_METASPACE = "▁"

_NFC_SHRINK = 4  # NFC makes text at most 3.5 times shorter in UTF-8 bytes (U+1FBE U+0308 U+0301 → U+0390), rounded up


class LeadingSpace(Enum):
    """What a decoder does to the space that its encoder put before the text."""

    KEPT = auto()
    CUT_FROM_TEXT = auto()
    """The text's first character, if it is a space (decoder "Strip")."""
    CUT_FROM_FIRST_TOKEN = auto()
    """Every space of the first token (decoder "Metaspace")."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How tokens spell bytes."""

    byte_level: bool
    byte_fallback: bool
    leading_space: LeadingSpace


class Tokenizer:
    """A model's tokenizer. Immutable after loading; encode may be called from any thread."""

    def __init__(
        self, backend: tokenizers.Tokenizer, pipeline: dict[str, Any], special_tokens: Mapping[str, str]
    ) -> None:
        """`pipeline`: the content of tokenizer.json. Raises ModelUnsupported when its decoder is of neither layout."""
        self._backend = backend
        self._layout = _read_layout(pipeline["decoder"])
        added = backend.get_added_tokens_decoder()
        self.special_tokens = dict(special_tokens)
        """bos_token, eos_token, … → their text, those the model has: variables of a chat template."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Tokens that no output text shows."""
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values()) + 1
        """Ids are in [0, vocab_size). The model's own vocabulary may be padded beyond it."""
        self._token_bytes = [b""] * self.vocab_size
        for token, token_id in vocab.items():
            self._token_bytes[token_id] = _bytes_of(token, self._layout)
        self._whole_texts: dict[int, str | None] = {}  # found so far
        self.leading_space = self._layout.leading_space
        self._dropped_bytes = b""
        self.longest_token_bytes: int | None = None
        """Bytes of input text that one token can stand for, at most; None: no bound can be told."""
        self._bound_token_bytes(pipeline, vocab)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids. Raises InvalidRequest for text with a lone surrogate."""
        to_utf8(text)
        # unlike encode: no offsets, which nobody asks for, and the GIL is released meanwhile
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def min_tokens(self, num_bytes: int) -> int:
        """Tokens that a text of this many countable bytes (see below) has at least, found without tokenizing it."""
        return 0 if self.longest_token_bytes is None else -(-num_bytes // self.longest_token_bytes)

    def countable_bytes(self, data: bytes) -> int:
        """How many of these UTF-8 bytes end up in tokens: a vocabulary without some byte drops it silently."""
        return len(data.translate(None, self._dropped_bytes))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text; of a special token those of its name. Empty for an unknown id."""
        return self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""

    def whole_text(self, token_id: int) -> str | None:
        """The text one token adds between whole characters, "" for a special one; None when it is not whole itself."""
        try:
            return self._whole_texts[token_id]
        except KeyError:
            return self._find_whole_text(token_id)

    def _find_whole_text(self, token_id: int) -> str | None:
        text: str | None = ""
        if token_id not in self.special_ids:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
        if token_id < self.vocab_size:  # no further: what comes from outside must not fill the memory
            self._whole_texts[token_id] = text
        return text

    def token_text(self, token_id: int) -> str:
        r"""A token as logprobs name it: its text, or `bytes:\xe4\xbd` when it is not whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _bound_token_bytes(self, pipeline: dict[str, Any], vocab: Mapping[str, int]) -> None:
        """Find longest_token_bytes, unless something in the pipeline lets one token swallow any amount of text."""
        model = pipeline["model"]
        shrink = _normalizer_shrink(pipeline["normalizer"])
        strips = any(token.lstrip or token.rstrip for token in self._backend.get_added_tokens_decoder().values())
        if shrink is None or strips or not _keeps_all_text(pipeline["pre_tokenizer"]):
            return
        if self._layout.byte_level and model.get("unk_token") is None:
            self._dropped_bytes = bytes(byte for char, byte in _BYTE_OF_CHAR.items() if char not in vocab)
        elif not model.get("byte_fallback") or not all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
            return
        self.longest_token_bytes = shrink * max(map(len, self._token_bytes))


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load a Hugging Face directory's tokenizer. Raises ModelUnsupported when it has no tokenizer.json we can decode.

    As in transformers, tokenizer.json is the truth, BOS and EOS included (add_bos_token and add_eos_token are ignored);
    tokenizer_config.json names the special tokens and adds the tokens that the former lacks.
    """
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ModelUnsupported(f"{model_dir}: no tokenizer.json")
    content = path.read_text(encoding="utf-8")
    backend = tokenizers.Tokenizer.from_str(content)
    backend.no_truncation()
    backend.no_padding()
    config = read_json(model_dir / "special_tokens_map.json") | read_json(model_dir / "tokenizer_config.json")
    special_tokens = _add_configured_tokens(backend, config)
    return Tokenizer(backend, json.loads(content), special_tokens)


def read_json(path: Path) -> dict[str, Any]:
    """A model directory's optional JSON file; {} when there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def to_utf8(text: str) -> bytes:
    """Raises InvalidRequest for a lone surrogate, which JSON can spell and Unicode text cannot contain."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("the text contains a lone surrogate (\\ud800 to \\udfff), which is not Unicode") from error


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> dict[str, str]:
    """Add tokenizer_config.json's tokens where tokenizer.json lacks them; the named special tokens' texts."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    by_id = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
    backend.add_tokens([_added_token(spec) for _, spec in by_id if spec["content"] not in known])
    named = {name: config[name] for name in NAMED_SPECIAL_TOKENS if config.get(name)}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values()) if isinstance(extra, dict) else extra
    backend.add_special_tokens([_added_token(spec) for spec in [*named.values(), *extra]])
    return {name: spec if isinstance(spec, str) else spec["content"] for name, spec in named.items()}


def _added_token(spec: str | dict[str, Any]) -> tokenizers.AddedToken:
    if isinstance(spec, str):
        return tokenizers.AddedToken(spec, special=True, normalized=False)
    flags = {flag: spec[flag] for flag in ("single_word", "lstrip", "rstrip", "normalized", "special") if flag in spec}
    return tokenizers.AddedToken(spec["content"], **flags)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are their own Latin-1 character, the others U+0100 … in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(token: str, layout: _Layout) -> bytes:
    """The bytes that a token, as the vocabulary spells it, adds to a text."""
    if layout.byte_level:
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token outside the alphabet stands for itself
            return token.encode()
    if layout.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            pass
    return token.replace(_METASPACE, " ").encode()


def _read_layout(decoder: dict[str, Any] | None) -> _Layout:
    """Raises ModelUnsupported naming the decoder step that we do not know."""
    steps: list[Any] = decoder["decoders"] if decoder and decoder["type"] == "Sequence" else [decoder]
    byte_level = metaspace = byte_fallback = fused = False
    leading_space = LeadingSpace.KEPT
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}:
                metaspace = True
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": (0 | 1) as start, "stop": 0} if fused:
                leading_space = LeadingSpace.CUT_FROM_TEXT if start else LeadingSpace.KEPT
            case {"type": "Metaspace", "replacement": "▁"}:
                metaspace = True
                if step.get("prepend_scheme", "always") != "never":
                    leading_space = LeadingSpace.CUT_FROM_FIRST_TOKEN
            case _:
                raise ModelUnsupported(f"tokenizer.json: decoder step {step} is not supported")
    if byte_level == metaspace:
        raise ModelUnsupported(f"tokenizer.json: decoder {decoder} is neither byte-level nor SentencePiece-like")
    return _Layout(byte_level, byte_fallback, leading_space)


def _normalizer_shrink(normalizer: dict[str, Any] | None) -> int | None:
    """How many times shorter the normalizer can make a text, in bytes; None when it may drop any amount."""
    match normalizer:
        case None | {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
            return 1
        case {"type": "NFC"}:
            return _NFC_SHRINK
        case {"type": "Sequence", "normalizers": steps}:
            product = 1
            for step in steps:
                shrink = _normalizer_shrink(step)
                if shrink is None:
                    return None
                product *= shrink
            return product
    return None


def _keeps_all_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    """No part of the text is thrown away between words."""
    match pre_tokenizer:
        case None | {"type": "ByteLevel" | "Metaspace" | "Digits"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": behavior}:
            return bool(behavior != "Removed")
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(_keeps_all_text(step) for step in steps)
    return False
