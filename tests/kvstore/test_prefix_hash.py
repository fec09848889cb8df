"""Prefix hashes are the same bytes on every machine, in every process, whatever computes them."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefix_hash import chain, namespace, root_hash
from wire.ids import UNIT_TOKENS, UnitHash
from wire.plan import ModelCard

CARD = ModelCard(
    name="smollm2",
    revision="r1",
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    max_model_len=8192,
    eos_token_ids=(2,),
    kv_dtype="float32",
)
TOKENS = [(7 * i) % 49152 for i in range(70)]  # four full units and a tail of six

# Golden vectors: the bytes that every stored index and every worker relies on. They never change within a namespace.
ROOT = "20bdea03672cb792113dd05d1b56ae66374ff8c626b958e87cbace1250fc33ec"
SALTED_ROOT = "c63c4cf6943ce193625abbb1681085c84f10ad9ac45c329c69b1dae775890a0c"
CHAIN = [
    "9c0241a6e90dd616100330b89390c97d02b769540e29ba1c13a60a439b0fb544",
    "5c9b6507a5922a5d6646dd711b9a9d7385cdcd42b06d241895dfcfa5a4767bba",
    "eb441cf3f0166f648cbce4bd6bf419d0fd247afe1098eab24bb5e2b326bebdb7",
    "01f78fc2bce29d35fe4097287f687842bc00f2874b8931710423a8a66964a531",
]

token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=5 * UNIT_TOKENS)


def reference_root(space: str, salt: str) -> bytes:
    return hashlib.sha256(b"phasemesh-kv-1\x00" + space.encode() + b"\x00" + salt.encode()).digest()


def reference_chain(parent: bytes, tokens: list[int]) -> list[bytes]:
    """The documented bytes, written down a second time: parent ‖ 16 × little-endian u32."""
    hashes = []
    for start in range(0, len(tokens) // 16 * 16, 16):
        parent = hashlib.sha256(parent + struct.pack("<16I", *tokens[start : start + 16])).digest()
        hashes.append(parent)
    return hashes


def test_golden_vectors() -> None:
    assert namespace(CARD) == "smollm2@r1/float32/16"
    root = root_hash(namespace(CARD))
    assert root.hex() == ROOT
    assert root_hash(namespace(CARD), "tenant-é").hex() == SALTED_ROOT
    assert [h.hex() for h in chain(root, TOKENS)] == CHAIN


@given(space=st.text(max_size=20), salt=st.text(max_size=20), tokens=token_lists)
def test_any_chain_equals_an_independent_implementation(space: str, salt: str, tokens: list[int]) -> None:
    root = root_hash(space, salt)
    assert root == reference_root(space, salt)
    assert chain(root, tokens) == reference_chain(root, tokens)


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_with_another_hash_seed_computes_the_same(seed: str) -> None:
    code = (
        "from kvstore.prefix_hash import chain, root_hash\n"
        f"print(*(h.hex() for h in chain(root_hash('smollm2@r1/float32/16'), {TOKENS})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONHASHSEED": seed},
        check=True,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout.split() == CHAIN


@given(tokens=token_lists, data=st.data())
def test_a_chain_may_be_continued_at_any_unit_boundary(tokens: list[int], data: st.DataObject) -> None:
    whole = chain(root_hash("ns"), tokens)
    cut = data.draw(st.integers(0, len(whole)))
    parent = whole[cut - 1] if cut else root_hash("ns")
    assert whole[:cut] + chain(parent, tokens, start=cut * UNIT_TOKENS) == whole


@given(tokens=st.lists(st.integers(0, 100), min_size=UNIT_TOKENS, max_size=5 * UNIT_TOKENS), data=st.data())
def test_a_changed_token_changes_its_unit_and_every_later_one_only(tokens: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:position], tokens[position] + 1, *tokens[position + 1 :]]
    before, after = chain(root_hash("ns"), tokens), chain(root_hash("ns"), changed)
    unit = position // UNIT_TOKENS
    assert before[:unit] == after[:unit]
    assert all(a != b for a, b in zip(before[unit:], after[unit:], strict=True))


@pytest.mark.parametrize("length", [0, 1, UNIT_TOKENS - 1, UNIT_TOKENS, UNIT_TOKENS + 1, 4 * UNIT_TOKENS])
def test_only_full_units_have_a_hash(length: int) -> None:
    hashes = chain(root_hash("ns"), list(range(length)))
    assert len(hashes) == length // UNIT_TOKENS
    assert all(len(h) == 32 for h in hashes)


def test_whatever_makes_kv_differ_makes_the_root_differ() -> None:
    def card(**changes: str) -> str:
        fields = {name: getattr(CARD, name) for name in CARD.__slots__} | changes
        return namespace(ModelCard(**fields))

    roots: list[UnitHash] = [
        root_hash(namespace(CARD)),
        root_hash(card(name="other")),
        root_hash(card(revision="r2")),
        root_hash(card(kv_dtype="bfloat16")),
        root_hash(namespace(CARD), "tenant-a"),
        root_hash(namespace(CARD), "tenant-b"),
    ]
    assert len(set(roots)) == len(roots)
