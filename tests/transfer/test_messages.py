"""Chunks are put together and taken apart by hand, and are protobuf's all the same."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from gpu_worker.transfer.messages import decode_chunk, encode_chunk
from gpu_worker.transfer.port import Bytes, KvFormat
from wire import transfer_pb2 as pb
from wire.errors import TransferFailed

FORMAT = KvFormat("float32", num_layers=300, num_kv_heads=1, row_size=4, element_bytes=4, unit_tokens=16)


def random_data(num_layers: int, num_units: int) -> Bytes:
    shape = (num_layers, 2, num_units, FORMAT.unit_layer_bytes)
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def as_message(data: Bytes, first_unit: int, first_layer: int) -> pb.PullPart:
    raw = data.tobytes()
    chunk = pb.Chunk(
        first_unit=first_unit,
        num_units=data.shape[2],
        first_layer=first_layer,
        num_layers=data.shape[0],
        crc32=zlib.crc32(raw),
        data=raw,
    )
    return pb.PullPart(chunk=chunk)


@pytest.mark.parametrize(
    ("first_unit", "num_units", "first_layer", "num_layers"), [(0, 1, 0, 1), (200, 300, 7, 2), (1, 2, 0, 300)]
)
def test_a_chunk_is_what_protobuf_makes_of_it(
    first_unit: int, num_units: int, first_layer: int, num_layers: int
) -> None:
    data = random_data(num_layers, num_units)
    units, layers = range(first_unit, first_unit + num_units), range(first_layer, first_layer + num_layers)
    pieces = [layer[half, at : at + 3] for layer in data for half in (0, 1) for at in range(0, num_units, 3)]
    part = encode_chunk(units, layers, pieces)
    message = as_message(data, first_unit, first_layer)
    assert pb.PullPart.FromString(part) == message
    for encoded in (part, message.SerializeToString()):
        chunk = decode_chunk(encoded, FORMAT, 500)
        assert (chunk.first_unit, chunk.first_layer) == (first_unit, first_layer)
        assert np.array_equal(chunk.data, data)


@pytest.mark.parametrize("place", [3, 8, -1])
def test_a_changed_byte_is_noticed(place: int) -> None:
    part = bytearray(encode_chunk(range(2, 5), range(1), [random_data(1, 3)]))
    part[place] ^= 4
    with pytest.raises(TransferFailed, match="chunk: "):
        decode_chunk(bytes(part), FORMAT, 500)


@pytest.mark.parametrize(
    "part",
    [
        b"",
        pb.PullPart(offer=pb.Offer(num_units=3)).SerializeToString(),
        pb.PullPart(chunk=pb.Chunk(first_unit=1)).SerializeToString(),
        as_message(random_data(1, 1), 0, 0).SerializeToString()[:-1],
        as_message(random_data(1, 1), 0, 0).SerializeToString() + b"\0",
        b"\x12\xff\xff\xff\xff\xff",
        b"\x12\x02\x32\x05",
    ],
)
def test_what_is_no_chunk_is_refused(part: bytes) -> None:
    with pytest.raises(TransferFailed, match=f"chunk: {len(part)} bytes that are none"):
        decode_chunk(part, FORMAT, 500)


@pytest.mark.parametrize(("first_unit", "first_layer"), [(498, 0), (0, 299)])
def test_what_was_not_asked_for_is_refused(first_unit: int, first_layer: int) -> None:
    part = as_message(random_data(2, 3), first_unit, first_layer).SerializeToString()
    with pytest.raises(TransferFailed, match="300 layers of 500 units were asked for"):
        decode_chunk(part, FORMAT, 500)


def test_data_that_are_not_as_long_as_they_should_be_are_refused() -> None:
    message = as_message(random_data(1, 3), 0, 0)
    message.chunk.num_units = 2
    with pytest.raises(TransferFailed, match="1536 bytes of data, not"):
        decode_chunk(message.SerializeToString(), FORMAT, 500)
