"""Copies of KV between pools: every byte of every run, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from gpu_worker.kernels.library import Kernels
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvFormat, UnitPlace
from gpu_worker.transfer.shared_pool import SharedPool
from wire.ids import PageId

NUM_LAYERS = 3
PAGE_SIZE = 32


@pytest.mark.parametrize("seed", range(4))
def test_runs_are_copied_whole_whatever_their_lengths_and_alignments(kernels: Kernels, seed: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, 1 << 18, np.uint8)
    target = rng.integers(0, 256, 1 << 18, np.uint8)
    expected = target.copy()
    runs = []
    at = 0
    for size in rng.choice([0, 1, 63, 64, 1000, 1023, 1024, 1025, 1151, 4096, 5000, 12288], 40):
        at += int(rng.integers(0, 200))
        begin = int(rng.integers(0, len(source) - size))
        runs.append((at, begin, size))
        expected[at : at + size] = source[begin : begin + size]
        at += int(size)
    kernels.copy_runs(target.ctypes.data, source.ctypes.data, np.array(runs, np.int64))
    assert np.array_equal(target, expected)


def random_pages(kv_format: KvFormat, num_pages: int, rng: np.random.Generator, kernels: Kernels | None) -> HostPages:
    pool = SharedPool(num_pages, num_pages * PAGE_SIZE // 16 * NUM_LAYERS * kv_format.unit_layer_bytes)
    pages = HostPages(kv_format, PAGE_SIZE, pool, copy_runs=None if kernels is None else kernels.copy_runs)
    for half in pages.halves:
        half[:] = rng.integers(0, 256, half.shape, np.uint8)
    return pages


@pytest.mark.parametrize(("row_size", "element_bytes"), [(64, 4), (5, 1)])
@pytest.mark.parametrize("with_kernels", [False, True])
def test_units_of_another_pool_come_to_their_places_and_nothing_else_changes(
    kernels: Kernels, with_kernels: bool, row_size: int, element_bytes: int
) -> None:
    rng = np.random.default_rng(1)
    kv_format = KvFormat("any", NUM_LAYERS, 3, row_size, element_bytes, unit_tokens=16)
    ours = random_pages(kv_format, 8, rng, kernels if with_kernels else None)
    theirs = random_pages(kv_format, 13, rng, None)
    before = [half.copy() for half in ours.halves]
    places = [UnitPlace(PageId(page), index) for page, index in [(6, 0), (6, 1), (7, 0), (1, 1), (3, 0)]]
    indices = [4, 5, 6, 25, 0]
    copier = ours.copier(places, theirs.units, indices)
    copier.copy(range(1))
    copier.copy(range(1, NUM_LAYERS))
    for half, old, there in zip(ours.halves, before, theirs.halves, strict=True):
        for place, index in zip(places, indices, strict=True):
            old[:, ours.unit_index(place)] = there[:, index]
        assert np.array_equal(half, old)


@pytest.mark.parametrize(("place", "index"), [(UnitPlace(PageId(8), 0), 0), (UnitPlace(PageId(0), 0), 26)])
def test_units_outside_either_pool_are_refused(kernels: Kernels, place: UnitPlace, index: int) -> None:
    rng = np.random.default_rng(1)
    kv_format = KvFormat("any", NUM_LAYERS, 3, 64, 4, unit_tokens=16)
    ours, theirs = random_pages(kv_format, 8, rng, kernels), random_pages(kv_format, 13, rng, None)
    with pytest.raises(ValueError, match=r"unit (16 of a layer of 16|26 of a layer of 26)"):
        ours.copier([UnitPlace(PageId(0), 0), place], theirs.units, [0, index])
