"""Incremental text equals the whole decode, and never has to be taken back."""

from __future__ import annotations

import codecs
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from tests.gateway_text.layouts import TEXTS

FRACTIONS = st.lists(st.floats(0, 1, exclude_max=True), max_size=12)
"""Token ids as places in the vocabulary, whatever its size."""


@pytest.fixture(scope="session")
def references(layout_dirs: dict[str, Path]) -> dict[str, tokenizers.Tokenizer]:
    """The `tokenizers` library's own decoders."""
    return {name: AutoTokenizer.from_pretrained(path).backend_tokenizer for name, path in layout_dirs.items()}


def streamed(tokenizer: Tokenizer, prompt_ids: list[int], output_ids: list[int]) -> str:
    detokenizer = Detokenizer(tokenizer, prompt_ids)
    return "".join(map(detokenizer.push_one, output_ids))


def incomplete_tail(tokenizer: Tokenizer, token_ids: list[int]) -> bytes:
    """The bytes of the character that the tokens end inside of, if they do."""
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(b"".join(tokenizer.token_bytes(i) for i in token_ids if i not in tokenizer.special_ids))
    return utf8.getstate()[0]


@pytest.mark.parametrize("layout", ["smollm2", "llama3", "qwen", "metaspace"])
@settings(deadline=None)
@given(prompt=FRACTIONS, output=FRACTIONS)
def test_random_tokens_decode_as_a_whole(
    layout: str,
    tokenizers_by_layout: dict[str, Tokenizer],
    references: dict[str, tokenizers.Tokenizer],
    prompt: list[float],
    output: list[float],
) -> None:
    tokenizer = tokenizers_by_layout[layout]
    prompt_ids = [int(x * tokenizer.vocab_size) for x in prompt]
    output_ids = [int(x * tokenizer.vocab_size) for x in output]

    def decode(token_ids: list[int]) -> str:
        text: str = references[layout].decode(token_ids, skip_special_tokens=True)
        return text.removesuffix(incomplete_tail(tokenizer, token_ids).decode(errors="replace"))

    expected = decode(prompt_ids + output_ids)[len(decode(prompt_ids)) :]
    assert streamed(tokenizer, prompt_ids, output_ids) == expected


@settings(deadline=None)
@given(prompt=FRACTIONS, text=st.text(max_size=4), output=FRACTIONS, cut=st.integers(0, 12))
def test_byte_fallback_decodes_as_a_whole(
    tokenizers_by_layout: dict[str, Tokenizer],
    references: dict[str, tokenizers.Tokenizer],
    prompt: list[float],
    text: str,
    output: list[float],
    cut: int,
) -> None:
    """Well-formed byte runs between other tokens; the prompt may end anywhere, inside a character too."""
    tokenizer = tokenizers_by_layout["llama2"]
    first_byte, first_other = 3, 3 + 256
    others = tokenizer.vocab_size - first_other
    run = [first_byte + byte for byte in text.encode()]
    ids = [first_other + int(x * others) for x in prompt] + run + [first_other + int(x * others) for x in output]

    def decode(token_ids: list[int]) -> str:
        while incomplete_tail(tokenizer, token_ids):
            token_ids = token_ids[:-1]
        decoded: str = references["llama2"].decode(token_ids, skip_special_tokens=True)
        return decoded

    cut = min(cut, len(ids))
    assert streamed(tokenizer, ids[:cut], ids[cut:]) == decode(ids)[len(decode(ids[:cut])) :]


@pytest.mark.parametrize("layout", ["smollm2", "llama2", "llama3", "qwen"])
@pytest.mark.parametrize("text", [text for text in TEXTS if "<" not in text and "▁" not in text and "\x04" not in text])
def test_encoded_text_comes_back(layout: str, text: str, tokenizers_by_layout: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_layout[layout]
    expected = unicodedata.normalize("NFC", text) if layout == "qwen" else text
    assert streamed(tokenizer, [], tokenizer.encode(text, True)) == expected


@pytest.mark.parametrize("layout", ["smollm2", "llama2", "llama3", "qwen"])
def test_a_character_split_over_tokens_appears_once_and_whole(
    layout: str, tokenizers_by_layout: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_layout[layout]
    ids = tokenizer.encode("x🏳x", False)
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [detokenizer.push([token_id]) for token_id in ids]
    assert len(ids) > 3
    assert "".join(pieces) == "x🏳x"
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("layout", ["smollm2", "llama2"])
def test_a_prompt_that_ends_inside_a_character_is_continued(
    layout: str, tokenizers_by_layout: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_layout[layout]
    ids = tokenizer.encode("He said: 🏳 ok", False)
    whole = [i for i in range(1, len(ids)) if incomplete_tail(tokenizer, ids[:i])]
    assert whole
    for cut in whole:
        assert streamed(tokenizer, ids[:cut], ids[cut:]) == "🏳 ok"


def test_bytes_that_can_never_become_text_are_replaced_at_once(tokenizers_by_layout: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_layout["llama2"]
    byte_token = {byte: 3 + byte for byte in (0xE4, 0xBD, 0x41)}
    detokenizer = Detokenizer(tokenizer, [])
    assert detokenizer.push([byte_token[0xE4], byte_token[0xBD]]) == ""
    assert detokenizer.push([byte_token[0x41]]) == "\ufffdA"


def test_an_output_cut_inside_a_character_ends_before_it(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("ok 🏳", False)
    assert streamed(smollm2, [], ids[:-1]).strip() == "ok"


@pytest.mark.parametrize("layout", ["llama2", "metaspace"])
def test_the_leading_space_goes_only_where_the_text_begins(
    layout: str, tokenizers_by_layout: dict[str, Tokenizer]
) -> None:
    tokenizer = tokenizers_by_layout[layout]
    ids = tokenizer.encode("The quick fox", True)
    bos, first = ids[:1], ids[1:]
    assert streamed(tokenizer, [], first) == "The quick fox"
    assert streamed(tokenizer, bos, first) == "The quick fox"
    assert streamed(tokenizer, ids, first) == " The quick fox"


def test_special_tokens_show_no_text(smollm2: Tokenizer) -> None:
    im_end = 2
    assert streamed(smollm2, [], [im_end, *smollm2.encode("hi", False), im_end]) == "hi"
