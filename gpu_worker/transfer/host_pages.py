"""KV pages in this process's memory as transfers see them: bytes of units, copied in as few pieces as they lie in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpu_worker.transfer.port import Bytes, Generations, KvFormat, UnitPlace
from gpu_worker.transfer.shared_pool import PoolAddress, PoolLayout, SharedPool

Run: TypeAlias = tuple[int, int, int]
"""Where it goes, where it comes from, and how long it is."""
Runs: TypeAlias = NDArray[np.int64]
"""[n, 3]."""
CopyRuns: TypeAlias = Callable[[int, int, Runs], None]
"""Copies runs of bytes, offsets from two addresses: (to, from, runs). All is written when it returns."""


class HostPages:
    """Implements gpu_worker.transfer.port.KvPages over a pool whose K and V are each
    [num_layers, num_pages, page_size, num_kv_heads, row_size]."""

    def __init__(
        self, kv_format: KvFormat, page_size: int, pool: SharedPool, *, copy_runs: CopyRuns | None = None
    ) -> None:
        self.format = kv_format
        self.page_size = page_size
        self.units_per_page = page_size // kv_format.unit_tokens
        self._pool = pool
        self.units = pool_units(kv_format, pool.layout, memoryview(pool.buffer))
        self._copy_runs = copy_runs

    @property
    def halves(self) -> tuple[Bytes, Bytes]:
        """K and V, each [num_layers, units of a layer, unit_layer_bytes]."""
        return self.units[0], self.units[1]

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
        for at, first, count in self._runs(places):
            data[at : at + count] = self.units[:, layer, first : first + count].swapaxes(0, 1)
        return data

    def pieces(self, layer: int, places: Sequence[UnitPlace]) -> list[Bytes]:
        """One layer of units, [2 (K, V), len(places), unit_layer_bytes] in contiguous pieces: the pages themselves."""
        runs = self._runs(places)
        return [half[layer, first : first + count] for half in self.halves for _, first, count in runs]

    def write(self, layer: int, places: Sequence[UnitPlace], data: Bytes) -> None:
        """Store one layer of units, as `read` gave it."""
        for at, first, count in self._runs(places):
            self.units[:, layer, first : first + count] = data[at : at + count].swapaxes(0, 1)

    def copier(self, places: Sequence[UnitPlace], theirs: Bytes, indices: Sequence[int]) -> LayerCopier:
        """Of units out of another pool, unit indices[i] of a layer to places[i]. theirs: its pool_units.

        Raises ValueError when the pools have no such units.
        """
        ours = self._indices(places)
        for pool, of_pool in ((self.units, ours), (theirs, indices)):
            if max(of_pool, default=0) >= pool.shape[2]:
                raise ValueError(f"unit {max(of_pool)} of a layer of {pool.shape[2]}")
        return LayerCopier(self.units, theirs, common_runs(ours, indices), self._copy_runs)

    def unit_index(self, place: UnitPlace) -> int:
        """Where a unit lies among all units of a layer."""
        return place.page_id * self.units_per_page + place.index

    def _indices(self, places: Sequence[UnitPlace]) -> list[int]:
        return [place.page_id * self.units_per_page + place.index for place in places]

    def _runs(self, places: Sequence[UnitPlace]) -> list[Run]:
        """(position among places, first unit, length) of each stretch of neighbours."""
        return common_runs(range(len(places)), self._indices(places))


class LayerCopier:
    """Runs of units out of one pool into another. Both must stay mapped while this is used, and this keeps them."""

    def __init__(self, ours: Bytes, theirs: Bytes, runs: Sequence[Run], copy_runs: CopyRuns | None) -> None:
        """ours, theirs: as of pool_units. runs: first unit here, first unit there, units. copy_runs None: numpy does
        it, half as fast."""
        self._ours, self._theirs = ours, theirs
        self._runs = runs
        self._copy_runs = copy_runs
        if copy_runs is not None:
            self._addresses = ours.ctypes.data, theirs.ctypes.data
            self._by_layer = _byte_runs(ours, theirs, runs)

    def copy(self, layers: range) -> None:
        if self._copy_runs is not None:
            self._copy_runs(*self._addresses, self._by_layer[layers.start : layers.stop].reshape(-1, 3))
            return
        to, source = (units[:, layers.start : layers.stop] for units in (self._ours, self._theirs))
        for begin, first, count in self._runs:
            to[:, :, begin : begin + count] = source[:, :, first : first + count]


def _byte_runs(ours: Bytes, theirs: Bytes, runs: Sequence[Run]) -> Runs:
    """Runs of bytes of runs of units: [num_layers, 2 * len(runs), 3]; ours, theirs: as of pool_units."""
    (our_half, our_layer, unit, _), (their_half, their_layer, _, _) = ours.strides, theirs.strides
    num_layers = ours.shape[1]
    halves = np.array([[[0, 0, 0]], [[our_half, their_half, 0]]], np.int64)
    layers = np.arange(num_layers).reshape(-1, 1, 1, 1) * np.array([our_layer, their_layer, 0], np.int64)
    by_layer = layers + (halves + unit * np.array(runs, np.int64).reshape(-1, 3))
    return by_layer.reshape(num_layers, -1, 3)


def pool_units(kv_format: KvFormat, layout: PoolLayout, pool: memoryview) -> Bytes:
    """K and V of a mapped pool by unit: [2, num_layers, units of a layer, unit_layer_bytes]."""
    unit = kv_format.unit_layer_bytes
    layer = layout.half_bytes // kv_format.num_layers
    return np.ndarray(
        (2, kv_format.num_layers, layer // unit, unit),
        np.uint8,
        pool,
        offset=layout.keys,
        strides=(layout.values - layout.keys, layer, unit, 1),
    )


def common_runs(first: Iterable[int], second: Iterable[int]) -> list[Run]:
    """(first index, second index, length) of each stretch that is consecutive in both."""
    runs = []
    begin = other_begin = length = 0
    for index, other in zip(first, second, strict=True):
        if length and index == begin + length and other == other_begin + length:
            length += 1
            continue
        if length:
            runs.append((begin, other_begin, length))
        begin, other_begin, length = index, other, 1
    if length:
        runs.append((begin, other_begin, length))
    return runs
