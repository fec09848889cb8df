"""KV pages in this process's memory as transfers see them: bytes of units, copied in as few pieces as they lie in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gpu_worker.transfer.port import Bytes, Generations, KvFormat, UnitPlace
from gpu_worker.transfer.shared_pool import PoolAddress, PoolLayout, SharedPool


class HostPages:
    """Implements gpu_worker.transfer.port.KvPages over a pool whose K and V are each
    [num_layers, num_pages, page_size, num_kv_heads, row_size]."""

    def __init__(self, kv_format: KvFormat, page_size: int, pool: SharedPool) -> None:
        self.format = kv_format
        self.page_size = page_size
        self.units_per_page = page_size // kv_format.unit_tokens
        self._pool = pool
        self.halves = pool_units(kv_format, pool.layout, memoryview(pool.buffer))

    @property
    def unit_bytes(self) -> int:
        return self.format.unit_bytes

    @property
    def generations(self) -> Generations:
        return self._pool.generations

    @property
    def pool_address(self) -> PoolAddress | None:
        """For a neighbour that maps the pool; None: it cannot be mapped."""
        return self._pool.address

    @property
    def pool_layout(self) -> PoolLayout:
        return self._pool.layout

    @property
    def memory_kind(self) -> str:
        return "DRAM"

    @property
    def device_id(self) -> int:
        return 0

    @property
    def half_addresses(self) -> tuple[int, int]:
        """Of K, and of V."""
        keys, values = (half.ctypes.data for half in self.halves)
        return keys, values

    @property
    def half_bytes(self) -> int:
        return self._pool.layout.half_bytes

    def read(self, layer: int, places: Sequence[UnitPlace]) -> Bytes:
        """A copy of one layer of units: [len(places), 2 (K, V), unit_layer_bytes]."""
        data = np.empty((len(places), 2, self.format.unit_layer_bytes), np.uint8)
        for at, first, count in runs([self.unit_index(place) for place in places]):
            for half, units in enumerate(self.halves):
                data[at : at + count, half] = units[layer, first : first + count]
        return data

    def write(self, layer: int, places: Sequence[UnitPlace], data: Bytes) -> None:
        """Store one layer of units, as `read` gave it."""
        for at, first, count in runs([self.unit_index(place) for place in places]):
            for half, units in enumerate(self.halves):
                units[layer, first : first + count] = data[at : at + count, half]

    def unit_index(self, place: UnitPlace) -> int:
        """Where a unit lies among all units of a layer."""
        return place.page_id * self.units_per_page + place.index


def pool_units(kv_format: KvFormat, layout: PoolLayout, pool: memoryview) -> tuple[Bytes, Bytes]:
    """K and V of a mapped pool by unit: each [num_layers, units of a layer, unit_layer_bytes]."""
    shape = (kv_format.num_layers, -1, kv_format.unit_layer_bytes)
    keys, values = (
        np.frombuffer(pool, np.uint8, layout.half_bytes, offset).reshape(shape)
        for offset in (layout.keys, layout.values)
    )
    return keys, values


def common_runs(first: Sequence[int], second: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first index, second index, length) of each stretch that is consecutive in both."""
    for at, index, count in runs(first):
        for offset, other, length in runs(second[at : at + count]):
            yield index + offset, other, length


def runs(indices: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(position in `indices`, first index, length) of each stretch of consecutive indices."""
    begun = 0
    for at in range(1, len(indices) + 1):
        if at == len(indices) or indices[at] != indices[at - 1] + 1:
            yield begun, indices[begun], at - begun
            begun = at
