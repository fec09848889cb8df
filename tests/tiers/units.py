"""Small units in few words."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace

import numpy as np

from gpu_worker.tiers.open_tiers import open_codec
from gpu_worker.tiers.unit_codec import Bytes, LowerTierDtype, UnitCodec
from gpu_worker.transfer.port import KvFormat
from wire.ids import UnitHash

KV_FORMAT = KvFormat("float32", num_layers=3, num_kv_heads=2, row_size=8, element_bytes=4, unit_tokens=16)
CODEC = open_codec(KV_FORMAT, "model@1/float32/16", LowerTierDtype.AUTO)
_cells = itertools.count()


def a_hash(number: int) -> UnitHash:
    return UnitHash(hashlib.sha256(str(number).encode()).digest())


def hashes(count: int, start: int = 0) -> list[UnitHash]:
    return [a_hash(number) for number in range(start, start + count)]


def a_unit(number: int, kv_format: KvFormat = KV_FORMAT) -> Bytes:
    """[unit_bytes]: standard normal float32 numbers, the same ones for the same number."""
    values = np.random.default_rng(number).standard_normal(kv_format.unit_bytes // 4, dtype=np.float32)
    return values.view(np.uint8)


def encoded(number: int, codec: UnitCodec = CODEC) -> memoryview:
    """Unit `number` under the hash of that number."""
    out = memoryview(bytearray(codec.encoded_bytes))
    codec.encode(a_hash(number), a_unit(number), out)
    return out


def a_codec(dtype: LowerTierDtype, element_type: str = "float32") -> UnitCodec:
    kv_format = replace(KV_FORMAT, dtype=element_type, element_bytes=4 if element_type == "float32" else 2)
    return open_codec(kv_format, "model@1/float32/16", dtype)


def a_cell() -> str:
    """A cell of the test's own in a Redis that others use."""
    return f"tiers-{next(_cells)}"
