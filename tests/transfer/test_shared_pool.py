"""A pool that a neighbour maps: it is the one that was offered, or it is not opened."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvFormat, UnitPlace
from gpu_worker.transfer.shared_pool import PoolAddress, PoolLayout, SharedPool, open_pool
from gpu_worker.transfer.transports import GRPC
from tests.transfer.peers import EXPECTED, two_peers
from wire.ids import PageId

FORMAT = KvFormat("float32", num_layers=2, num_kv_heads=1, row_size=4, element_bytes=4, unit_tokens=16)


def pages_of(num_pages: int, page_size: int) -> HostPages:
    units = num_pages * page_size // 16
    return HostPages(FORMAT, page_size, SharedPool(num_pages, FORMAT.num_layers * units * FORMAT.unit_layer_bytes))


def places(*pairs: tuple[int, int]) -> list[UnitPlace]:
    return [UnitPlace(PageId(page), index) for page, index in pairs]


@pytest.mark.parametrize("page_size", [16, 64])
def test_units_are_read_back_where_they_were_written(page_size: int) -> None:
    pages = pages_of(8, page_size)
    last = page_size // 16 - 1
    where = places((3, 0), (3, last), (7, last), (0, 0)) if last else places((3, 0), (4, 0), (7, 0), (0, 0))
    random = np.random.default_rng(0)
    data = random.integers(0, 256, (2, 4, 2, FORMAT.unit_layer_bytes), np.uint8)
    for layer in (1, 0):
        pages.write(layer, where, data[layer])
    for layer in (0, 1):
        assert np.array_equal(pages.read(layer, where), data[layer])
        assert np.array_equal(pages.read(layer, where[::-1]), data[layer][::-1])
    keys, values = pages.halves
    assert np.count_nonzero(keys.any(axis=2)) == np.count_nonzero(values.any(axis=2)) == 8  # and nowhere else


def test_what_the_owner_writes_is_seen_and_cannot_be_changed_from_outside() -> None:
    pool = SharedPool(4, 8192)
    assert pool.address is not None
    mapped = open_pool(pool.address, pool.layout)
    pool.generations[2] = 7
    pool.buffer[pool.layout.values + 5] = 99
    assert np.frombuffer(mapped, np.uint64, 4, pool.layout.generations).tolist() == [0, 0, 7, 0]
    assert mapped[pool.layout.values + 5] == 99
    assert mapped.readonly


def test_another_pool_at_the_same_descriptor_is_not_taken_for_the_one_offered() -> None:
    pool = SharedPool(4, 8192)
    assert pool.address is not None
    for wrong in (replace(pool.address, token=bytes(16)), PoolAddress(os.getpid(), 0, pool.address.token)):
        with pytest.raises((OSError, ValueError)):
            open_pool(wrong, pool.layout)
    with pytest.raises(ValueError, match="not the pool that was offered"):
        open_pool(pool.address, PoolLayout(4, 4096))


def test_a_descriptor_ends_with_its_pool() -> None:
    pool = SharedPool(4, 8192)
    address, layout = pool.address, pool.layout
    assert address is not None
    del pool
    with pytest.raises((OSError, ValueError)):
        open_pool(address, layout)


async def test_a_pool_that_cannot_be_opened_is_pulled_by_grpc() -> None:
    async with two_peers() as (source, target):
        await source.compute()
        kv = source.worker.runner.kv
        assert isinstance(kv, HostPages) and kv.pool_address is not None
        kv._pool.address = replace(kv.pool_address, descriptor=9999)  # as from another pid namespace
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, report.failure, report.transport) == (8, None, GRPC)
        assert await target.continue_from(128) == EXPECTED


async def test_workers_of_two_hosts_do_not_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_worker.transfer.source.host_id", lambda: "another boot/another namespace")
    async with two_peers() as (source, target):
        await source.compute()
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, report.transport) == (8, GRPC)
