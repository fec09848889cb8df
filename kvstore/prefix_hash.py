"""SHA-256 chain hashes of token prefixes, one per unit of 16 tokens (design §5).

    tokens   | unit 0 | unit 1 | unit 2 | tail … |
    hashes     h0 = H(root, unit 0)   h1 = H(h0, unit 1)   h2 = H(h1, unit 2)     the tail has none

Equal hashes mean equal model, KV layout, salt and tokens from position 0 on. Canonical bytes:
`parent (32 bytes) ‖ token ids (16 × little-endian u32)`; the root is `SHA-256("phasemesh-kv-1" ‖ 0x00 ‖
namespace ‖ 0x00 ‖ salt)` in UTF-8. The same on every machine and Python version: never Python's `hash`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from wire.entries import pack_tokens
from wire.ids import UNIT_TOKENS, UnitHash
from wire.plan import ModelCard


def namespace(card: ModelCard) -> str:
    """Everything that makes two workers' KV interchangeable: model, weights revision, KV dtype, unit."""
    return f"{card.name}@{card.revision}/{card.kv_dtype}/{UNIT_TOKENS}"


def root_hash(namespace: str, salt: str = "") -> UnitHash:
    """Parent of the first unit."""
    return UnitHash(hashlib.sha256(b"\0".join((b"phasemesh-kv-1", namespace.encode(), salt.encode()))).digest())


def chain(parent: UnitHash, tokens: Sequence[int], start: int = 0) -> list[UnitHash]:
    """Hashes of the full units in tokens[start:], whose predecessor's hash is `parent`; start is a unit boundary."""
    packed = pack_tokens(list(tokens[start:]))
    unit_bytes = 4 * UNIT_TOKENS
    hashes: list[UnitHash] = []
    for offset in range(0, len(packed) - unit_bytes + 1, unit_bytes):
        parent = UnitHash(hashlib.sha256(parent + packed[offset : offset + unit_bytes]).digest())
        hashes.append(parent)
    return hashes
