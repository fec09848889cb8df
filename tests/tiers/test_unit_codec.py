from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.tiers.open_tiers import open_codec
from gpu_worker.tiers.unit_codec import LowerTierDtype, UnitInvalid, UnitLayout
from gpu_worker.transfer.port import KvFormat
from tests.tiers.units import CODEC, KV_FORMAT, a_codec, a_hash, a_unit, encoded
from wire.errors import ConfigInvalid

LOSSY = (LowerTierDtype.INT8, LowerTierDtype.FLOAT8)


def test_a_unit_comes_back_bit_for_bit() -> None:
    assert CODEC.decode(a_hash(1), encoded(1)).tobytes() == a_unit(1).tobytes()


def test_the_stored_bytes_are_these() -> None:
    """A change here makes everything that is stored somewhere unreadable: then count _VERSION up."""
    stored = memoryview(bytearray(CODEC.encoded_bytes))
    CODEC.encode(a_hash(1), np.arange(KV_FORMAT.unit_bytes, dtype=np.uint32).astype(np.uint8), stored)
    assert bytes(stored[:64]).hex() == (
        "504d4b5601000000" + "00180000" + "26b22d17" + "3effa9b293e128cde23d2f2c6acdeed5" + a_hash(1).hex()
    )
    assert bytes(stored[64:]) == bytes(64) + bytes(range(256)) * (KV_FORMAT.unit_bytes // 256)
    assert CODEC.encoded_bytes == 128 + KV_FORMAT.unit_bytes


@given(st.data())
def test_a_changed_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    stored = encoded(1)
    at = data.draw(st.one_of(st.integers(0, 140), st.integers(0, len(stored) - 1)))
    stored[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(UnitInvalid):
        CODEC.decode(a_hash(1), stored)


@given(st.integers(0, 2**16))
def test_a_torn_value_is_noticed(length: int) -> None:
    stored = encoded(1)
    length %= len(stored)
    with pytest.raises(UnitInvalid):
        CODEC.decode(a_hash(1), stored[:length])
    stored[length:] = bytes(len(stored) - length)
    with pytest.raises(UnitInvalid):
        CODEC.decode(a_hash(1), stored)


def test_another_units_value_is_refused() -> None:
    with pytest.raises(UnitInvalid):
        CODEC.decode(a_hash(2), encoded(1))


@pytest.mark.parametrize(
    "other",
    [
        open_codec(KV_FORMAT, "model@2/float32/16", LowerTierDtype.AUTO),
        open_codec(KvFormat("bfloat16", 3, 2, 16, 2, 16), "model@1/float32/16", LowerTierDtype.AUTO),
        a_codec(LowerTierDtype.INT8),
    ],
    ids=["namespace", "dtype", "stored type"],
)
def test_another_layouts_value_is_refused(other: object) -> None:
    assert CODEC.tag != other.tag  # type: ignore[attr-defined]
    with pytest.raises(UnitInvalid):
        CODEC.decode(a_hash(1), encoded(1, other))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", LOSSY)
def test_a_lossy_type_is_off_by_half_a_step_of_its_row_at_most(dtype: LowerTierDtype) -> None:
    codec = a_codec(dtype)
    rows = a_unit(1).view(np.float32).reshape(-1, KV_FORMAT.row_size)
    back = codec.decode(a_hash(1), encoded(1, codec)).view(np.float32).reshape(rows.shape)
    largest = np.abs(rows).max(-1, keepdims=True)
    if dtype is LowerTierDtype.INT8:
        bound = largest / 127 / 2
    else:
        bound = np.maximum(np.abs(rows) / 16, largest / 448 / 2**10)
    assert np.all(np.abs(back - rows) <= bound * (1 + 1e-5))
    assert np.any(back != rows)
    assert codec.encoded_bytes < CODEC.encoded_bytes * 0.45  # rows of 8: a scale of 4 bytes beside 8 of 32


@pytest.mark.parametrize("dtype", LOSSY)
@pytest.mark.parametrize("element_type", ["bfloat16", "float16"])
def test_half_types_are_rounded_alike(dtype: LowerTierDtype, element_type: str) -> None:
    import torch

    codec = a_codec(dtype, element_type)
    kind: torch.dtype = getattr(torch, element_type)
    values = torch.randn(codec.layout.unit_bytes // 2, generator=torch.Generator().manual_seed(1)).to(kind)
    out = memoryview(bytearray(codec.encoded_bytes))
    codec.encode(a_hash(1), values.view(torch.uint8).numpy(), out)
    back = torch.from_numpy(codec.decode(a_hash(1), out)).view(kind)
    assert (back.float() - values.float()).abs().max() < 0.2
    assert torch.corrcoef(torch.stack((back.float(), values.float())))[0, 1] > 0.998


@pytest.mark.parametrize("dtype", LOSSY)
def test_rows_of_zeros_stay_zero(dtype: LowerTierDtype) -> None:
    codec = a_codec(dtype)
    out = memoryview(bytearray(codec.encoded_bytes))
    codec.encode(a_hash(1), np.zeros(KV_FORMAT.unit_bytes, np.uint8), out)
    assert not codec.decode(a_hash(1), out).any()


@pytest.mark.parametrize("dtype", LOSSY)
@pytest.mark.parametrize(
    "pages",
    [KvFormat("float8_e4m3fn", 3, 2, 68, 1, 16), KvFormat("bfloat16", 2, 1, 1, 1, 16)],
    ids=["float8", "simulated"],
)
def test_pages_that_are_no_plain_numbers_cannot_be_rounded(dtype: LowerTierDtype, pages: KvFormat) -> None:
    with pytest.raises(ConfigInvalid, match="PHASEMESH_LOWER_TIER_DTYPE"):
        open_codec(pages, "m", dtype)


def test_a_layout_is_of_whole_rows() -> None:
    with pytest.raises(ValueError, match="row_bytes 32"):
        UnitLayout("m", 100, 32, "float32")
