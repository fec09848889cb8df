"""How one unit's KV lies below the device: a header and a payload, which is checked whole or not believed.

    | magic 4 | version 1 | dtype 1 | 0 2 | payload bytes 4 | crc 4 | layout 16 | unit hash 32 | 0 … 128 | payload … |

`layout` digests everything that gives the payload its meaning: the hashes' namespace, the bytes of a unit, the length
of a row. The CRC-32 covers the header without the CRC, then the payload. The bytes are the same in every tier.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from wire.ids import UnitHash

Bytes: TypeAlias = NDArray[np.uint8]
T = TypeVar("T")

HEADER_BYTES = 128
"""Aligns the payload for every element type."""
_MAGIC = b"PMKV"
_VERSION = 1
_HEADER = struct.Struct("<4sBBxxII16s32s")
_CRC_AT = slice(12, 16)


class LowerTierDtype(StrEnum):
    """PHASEMESH_LOWER_TIER_DTYPE. AUTO: the bytes of the device's pages; the others round every element."""

    AUTO = "auto"
    INT8 = "int8"
    FLOAT8 = "float8"


_DTYPE_CODES = {dtype: code for code, dtype in enumerate(LowerTierDtype)}


class UnitInvalid(Exception):
    """Stored bytes that are not this unit's, or not whole. To its reader: a miss."""


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """What the bytes of a unit on the device are: `unit_bytes / row_bytes` rows, K or V of one token, head and layer.

    dtype: of a row's elements, as torch names it ("float32").
    """

    namespace: str
    unit_bytes: int
    row_bytes: int
    dtype: str

    def __post_init__(self) -> None:
        if self.unit_bytes % self.row_bytes:
            raise ValueError(f"unit_bytes {self.unit_bytes} is not a multiple of row_bytes {self.row_bytes}")

    def digest(self) -> bytes:
        """16 bytes."""
        text = f"{self.namespace}\0{self.unit_bytes}\0{self.row_bytes}\0{self.dtype}"
        return hashlib.sha256(text.encode()).digest()[:16]


class RowCoder(Protocol):
    """Payload ⇄ the device's bytes."""

    @property
    def payload_bytes(self) -> int: ...

    def encode(self, unit: Bytes, payload: Bytes) -> None: ...

    def decode(self, payload: Bytes) -> Bytes:
        """[unit_bytes] in new memory."""
        ...


class PlainRows:
    """As they are."""

    def __init__(self, layout: UnitLayout) -> None:
        self.payload_bytes = layout.unit_bytes

    def encode(self, unit: Bytes, payload: Bytes) -> None:
        payload[:] = unit

    def decode(self, payload: Bytes) -> Bytes:
        return payload.copy()


class UnitCodec:
    """Encodes and checks units of one layout, held as one type. Stateless, so any thread may use it."""

    def __init__(self, layout: UnitLayout, dtype: LowerTierDtype, rows: RowCoder) -> None:
        """rows: for AUTO, PlainRows; else quantized_rows.QuantizedRows. gpu_worker/tiers/open_tiers.py chooses."""
        self.layout = layout
        self.dtype = dtype
        self._rows = rows
        self._digest = layout.digest()

    @property
    def encoded_bytes(self) -> int:
        """Of every unit, header included."""
        return HEADER_BYTES + self._rows.payload_bytes

    @property
    def tag(self) -> str:
        """Names layout and type in a path or a key: units with another tag are of no use here."""
        return f"{self._digest.hex()}-{self.dtype}"

    def encode(self, unit_hash: UnitHash, unit: Bytes, out: memoryview) -> None:
        """unit: [unit_bytes], as the device has it; out: [encoded_bytes], filled whole."""
        self._rows.encode(unit, np.frombuffer(out, np.uint8)[HEADER_BYTES:])
        out[:HEADER_BYTES] = bytes(HEADER_BYTES)
        fields = (_MAGIC, _VERSION, _DTYPE_CODES[self.dtype], self._rows.payload_bytes, 0, self._digest, unit_hash)
        _HEADER.pack_into(out, 0, *fields)
        out[_CRC_AT] = _crc(out).to_bytes(4, "little")

    def decode(self, unit_hash: UnitHash, encoded: memoryview) -> Bytes:
        """[unit_bytes] as the device has them, in new memory. Raises UnitInvalid."""
        if len(encoded) != self.encoded_bytes:
            raise UnitInvalid(f"{len(encoded)} bytes, not {self.encoded_bytes}")
        magic, version, dtype, payload_bytes, crc, digest, stored_hash = _HEADER.unpack_from(encoded)
        expected = (_MAGIC, _VERSION, _DTYPE_CODES[self.dtype], self._rows.payload_bytes, self._digest, unit_hash)
        if (magic, version, dtype, payload_bytes, digest, stored_hash) != expected:
            raise UnitInvalid("the header is another unit's, or of another layout")
        if crc != _crc(encoded):
            raise UnitInvalid("the checksum is wrong")
        return self._rows.decode(np.frombuffer(encoded, np.uint8)[HEADER_BYTES:])


def _crc(encoded: memoryview) -> int:
    """zlib's CRC-32 lets other threads run, and reads memory faster than a unit can be copied over a socket."""
    return zlib.crc32(encoded[_CRC_AT.stop :], zlib.crc32(encoded[: _CRC_AT.start]))


def tail_first(chain: Sequence[T]) -> Sequence[T]:
    """A chain in the order in which its units may go: without its head, a tail is worth nothing."""
    return chain[::-1]
