"""transfer.proto's messages and the records they stand for; chunks are checked here, at both ends."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from gpu_worker.transfer.port import Bytes, KvFormat
from gpu_worker.transfer.shared_pool import PoolAddress, PoolLayout
from wire import transfer_pb2 as pb
from wire.errors import TransferFailed

CHUNK_BYTES = 512 << 10
"""Data of one chunk; one unit in one layer at least. Chunks of 1 MiB, which no core's cache holds from copy to copy,
were measured a fifth slower."""


def encode_format(f: KvFormat) -> pb.KvFormat:
    return pb.KvFormat(
        dtype=f.dtype,
        num_layers=f.num_layers,
        num_kv_heads=f.num_kv_heads,
        row_size=f.row_size,
        element_bytes=f.element_bytes,
        unit_tokens=f.unit_tokens,
    )


def decode_format(m: pb.KvFormat) -> KvFormat:
    return KvFormat(
        dtype=m.dtype,
        num_layers=m.num_layers,
        num_kv_heads=m.num_kv_heads,
        row_size=m.row_size,
        element_bytes=m.element_bytes,
        unit_tokens=m.unit_tokens,
    )


def encode_pool(address: PoolAddress, layout: PoolLayout) -> pb.SharedPool:
    return pb.SharedPool(
        pid=address.pid,
        descriptor=address.descriptor,
        token=address.token,
        num_pages=layout.num_pages,
        half_bytes=layout.half_bytes,
    )


def decode_pool(m: pb.SharedPool) -> tuple[PoolAddress, PoolLayout]:
    return PoolAddress(m.pid, m.descriptor, m.token), PoolLayout(m.num_pages, m.half_bytes)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some layers of some units of a request, checked."""

    first_unit: int
    first_layer: int
    data: Bytes
    """[num_layers, 2 (K, V), num_units, unit_layer_bytes]."""


def encode_chunk(units: range, layers: range, pieces: Sequence[Bytes]) -> bytes:
    """A PullPart. pieces: in their order, the bytes of [len(layers), 2 (K, V), len(units), unit_layer_bytes].

    They may change while this runs: then what comes out is rubbish, with or without the right checksum.
    """
    views = [piece.data for piece in pieces]
    crc = 0
    for view in views:
        crc = zlib.crc32(view, crc)
    num_bytes = sum(view.nbytes for view in views)
    header = pb.Chunk(
        first_unit=units.start,
        num_units=len(units),
        first_layer=layers.start,
        num_layers=len(layers),
        crc32=crc,
    ).SerializeToString()
    data_header = _header(_DATA, num_bytes)
    chunk_header = _header(_CHUNK, len(header) + len(data_header) + num_bytes)
    return b"".join((chunk_header, header, data_header, *views))


def decode_offer(part: bytes) -> pb.Offer:
    return pb.PullPart.FromString(part).offer


def decode_chunk(part: bytes, kv_format: KvFormat, num_units: int) -> Chunk:
    """Its data are a view of the part's. Raises TransferFailed when it is damaged or was not asked for."""
    m, data = _split_chunk(part)
    if m.first_layer + m.num_layers > kv_format.num_layers or m.first_unit + m.num_units > num_units:
        raise TransferFailed(
            f"chunk: layers [{m.first_layer}, {m.first_layer + m.num_layers}) of units [{m.first_unit}, "
            f"{m.first_unit + m.num_units}), {kv_format.num_layers} layers of {num_units} units were asked for"
        )
    shape = (m.num_layers, 2, m.num_units, kv_format.unit_layer_bytes)
    if len(data) != math.prod(shape):
        raise TransferFailed(f"chunk: {len(data)} bytes of data, not {shape}")
    if zlib.crc32(data) != m.crc32:
        raise TransferFailed(f"chunk: checksum of layer {m.first_layer}, unit {m.first_unit} is wrong")
    return Chunk(m.first_unit, m.first_layer, np.frombuffer(data, np.uint8).reshape(shape))


# A chunk on the wire:   tag length | first_unit … crc32 | tag length | data          (protobuf's encoding, data last)

_CHUNK = pb.PullPart.CHUNK_FIELD_NUMBER << 3 | 2
_DATA = pb.Chunk.DATA_FIELD_NUMBER << 3 | 2
_VARINT, _FIXED32 = 0, 5


def _split_chunk(part: bytes) -> tuple[pb.Chunk, memoryview]:
    """Without its data, and these. Raises TransferFailed when it is none, or its data are not last."""
    try:
        begin = at = _enter(part, 0, _CHUNK)
        while part[at] != _DATA:
            at = _skip(part, at)
        return pb.Chunk.FromString(part[begin:at]), memoryview(part)[_enter(part, at, _DATA) :]
    except (IndexError, ValueError, DecodeError) as error:
        raise TransferFailed(f"chunk: {len(part)} bytes that are none") from error


def _header(tag: int, length: int) -> bytes:
    """Of a field of so many bytes."""
    encoded = bytearray([tag])
    while length > 0x7F:
        encoded.append(length & 0x7F | 0x80)
        length >>= 7
    encoded.append(length)
    return bytes(encoded)


def _enter(part: bytes, at: int, tag: int) -> int:
    """Where the bytes of the field at `at` begin, which has this tag and reaches to the end."""
    if part[at] != tag:
        raise ValueError(f"tag {part[at]}, not {tag}")
    begin = _varint_end(part, at + 1)
    length = sum((byte & 0x7F) << 7 * i for i, byte in enumerate(part[at + 1 : begin]))
    if length != len(part) - begin:
        raise ValueError(f"tag {tag}: {length} bytes of {len(part) - begin}")
    return begin


def _skip(part: bytes, at: int) -> int:
    """Behind the number at `at`."""
    wire_type = part[at] & 7
    if part[at] > 0x7F or wire_type not in (_VARINT, _FIXED32):
        raise ValueError(f"tag {part[at]}: not a number of a chunk's")
    return at + 5 if wire_type == _FIXED32 else _varint_end(part, at + 1)


def _varint_end(part: bytes, at: int) -> int:
    while part[at] > 0x7F:
        at += 1
    return at + 1
