"""Token ids equal transformers'; the bounds told without tokenizing are true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.gateway_text.layouts import LAYOUTS, TEXTS
from wire.errors import InvalidRequest, ModelUnsupported

ALL_LAYOUTS = ["smollm2", *LAYOUTS]


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_ids_equal_transformers(layout: str, layout_dirs: dict[str, Path]) -> None:
    reference = AutoTokenizer.from_pretrained(layout_dirs[layout])
    tokenizer = load_tokenizer(layout_dirs[layout])
    for text in TEXTS:
        for add_special_tokens in (False, True):
            expected = reference.encode(text, add_special_tokens=add_special_tokens)
            assert tokenizer.encode(text, add_special_tokens) == expected, text
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.special_tokens.items() <= reference.special_tokens_map.items()
    assert tokenizer.special_ids >= set(reference.all_special_ids)


def test_bos_follows_the_model(tokenizers_by_layout: dict[str, Tokenizer]) -> None:
    starts_with_bos = {
        name: len(tokenizer.encode("x", True)) > len(tokenizer.encode("x", False))
        for name, tokenizer in tokenizers_by_layout.items()
    }
    assert starts_with_bos == {"smollm2": False, "llama2": True, "llama3": True, "metaspace": True, "qwen": False}


def test_added_tokens_of_the_config_are_one_token_each(tokenizers_by_layout: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_layout["qwen"]
    (im_start,) = tokenizer.encode("<|im_start|>", False)
    (tool_call,) = tokenizer.encode("<tool_call>", False)
    assert im_start in tokenizer.special_ids
    assert tool_call not in tokenizer.special_ids


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
def test_token_bytes_spell_the_text(layout: str, tokenizers_by_layout: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers_by_layout[layout]
    text = "It's 今天 naïve 😀\n"
    spelled = b"".join(tokenizer.token_bytes(token_id) for token_id in tokenizer.encode(text, False))
    assert spelled.decode().removeprefix(" ") == text


def test_token_text_tells_characters_from_bytes(smollm2: Tokenizer) -> None:
    first, *_ = smollm2.encode("日", False)
    assert smollm2.token_text(first) == r"bytes:\xe6\x97"
    assert smollm2.token_bytes(first) == b"\xe6\x97"
    assert smollm2.token_text(smollm2.encode(" world", False)[0]) == " world"
    assert smollm2.token_text(2) == "<|im_end|>"


def test_an_id_beyond_the_vocabulary_has_no_bytes(smollm2: Tokenizer) -> None:
    assert smollm2.token_bytes(smollm2.vocab_size) == b""


@pytest.mark.parametrize("layout", ALL_LAYOUTS)
@settings(deadline=None)
@given(text=st.text() | st.text(alphabet="\x04\x06 aé\u1fbe\u0308\u0301😀\u0378", max_size=200))
def test_min_tokens_never_exceeds_the_real_number(
    layout: str, tokenizers_by_layout: dict[str, Tokenizer], text: str
) -> None:
    tokenizer = tokenizers_by_layout[layout]
    bound = tokenizer.min_tokens(tokenizer.countable_bytes(text.encode()))
    assert bound <= len(tokenizer.encode(text, False))


def test_min_tokens_is_reached_by_the_longest_token(smollm2: Tokenizer) -> None:
    longest = "\n" + " " * 80
    assert smollm2.longest_token_bytes == len(longest)
    assert smollm2.min_tokens(len(longest)) == len(smollm2.encode(longest, False)) == 1


def test_bytes_that_the_vocabulary_drops_do_not_count(smollm2: Tokenizer) -> None:
    assert smollm2.encode("\x04" * 1000, False) == []
    assert smollm2.countable_bytes(b"\x04a" * 1000) == 1000


@pytest.mark.parametrize("flag", ["lstrip", "rstrip"])
def test_a_token_that_swallows_spaces_leaves_no_bound(flag: str, smollm2_dir: Path, tmp_path: Path) -> None:
    content = json.loads((smollm2_dir / "tokenizer.json").read_text())
    content["added_tokens"][2][flag] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    text = " " * 10_000 + "<|im_end|>" + " " * 10_000
    assert tokenizer.longest_token_bytes is None
    assert tokenizer.min_tokens(len(text)) == 0


def test_a_lone_surrogate_is_refused(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("a\ud800b", False)


def test_an_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelUnsupported, match="WordPiece"):
        load_tokenizer(tmp_path)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
