"""transfer.proto's messages and the records they stand for; chunks are checked here, at both ends."""

from __future__ import annotations

import zlib

import numpy as np

from gpu_worker.transfer.port import Bytes, KvFormat
from gpu_worker.transfer.shared_pool import PoolAddress, PoolLayout
from wire import transfer_pb2 as pb
from wire.errors import TransferFailed

CHUNK_BYTES = (1 << 20) - 1024
"""Data of one chunk, so that its message stays under 1 MiB; one unit in one layer at least."""


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


def encode_chunk(first_unit: int, first_layer: int, data: Bytes) -> pb.PullPart:
    """data: [num_layers, num_units, 2, unit_layer_bytes]."""
    part = pb.PullPart()
    chunk = part.chunk  # filled where it is: given to the constructor, the data would be copied twice more
    chunk.first_unit, chunk.num_units = first_unit, data.shape[1]
    chunk.first_layer, chunk.num_layers = first_layer, data.shape[0]
    chunk.data = data.tobytes()
    chunk.crc32 = zlib.crc32(chunk.data)
    return part


def decode_chunk(m: pb.Chunk, kv_format: KvFormat, num_units: int) -> Bytes:
    """[num_layers, num_units, 2, unit_layer_bytes]. Raises TransferFailed when it is damaged or was not asked for."""
    if m.first_layer + m.num_layers > kv_format.num_layers or m.first_unit + m.num_units > num_units:
        raise TransferFailed(
            f"chunk: layers [{m.first_layer}, {m.first_layer + m.num_layers}) of units [{m.first_unit}, "
            f"{m.first_unit + m.num_units}), {kv_format.num_layers} layers of {num_units} units were asked for"
        )
    shape = (m.num_layers, m.num_units, 2, kv_format.unit_layer_bytes)
    if len(m.data) != m.num_layers * m.num_units * 2 * kv_format.unit_layer_bytes:
        raise TransferFailed(f"chunk: {len(m.data)} bytes of data, not {shape}")
    if zlib.crc32(m.data) != m.crc32:
        raise TransferFailed(f"chunk: checksum of layer {m.first_layer}, unit {m.first_unit} is wrong")
    return np.frombuffer(m.data, np.uint8).reshape(shape)
