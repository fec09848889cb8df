"""What every store below the pages must do: the contract, over the three of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_worker.tiers.disk_store import DiskStore
from gpu_worker.tiers.host_store import HostStore
from gpu_worker.tiers.port import LowerStore, OnChange, UnitStore
from gpu_worker.tiers.redis_store import RedisStore
from gpu_worker.tiers.redis_thread import RedisThread
from tests.tiers.units import CODEC, a_cell, a_hash, encoded, hashes
from wire.ids import UnitHash
from wire.plan import LOWER_TIERS, Tier

CAPACITY = 4
"""Units each store has room for."""


class Kept:
    """A store, a way to put into it, and a twin that follows its changes."""

    def __init__(self, open_store: Callable[[OnChange], UnitStore]) -> None:
        self.twin: set[UnitHash] = set()
        self.store = open_store(self._changed)

    def _changed(self, unit_hash: UnitHash, is_here: bool) -> None:
        assert (unit_hash in self.twin) != is_here, "told twice"
        self.twin ^= {unit_hash}

    def put(self, number: int) -> bool:
        if isinstance(self.store, HostStore):
            return self.store.put(a_hash(number), lambda slot: _fill(slot, encoded(number)))
        lower: LowerStore = self.store  # type: ignore[assignment]  # the other two
        return lower.put(a_hash(number), encoded(number))

    def has(self, number: int) -> bool:
        """And it is whole."""
        unit = self.store.get(a_hash(number))
        if unit is None:
            return False
        with unit:
            CODEC.decode(a_hash(number), unit.encoded)
        return True


def _fill(slot: memoryview, value: memoryview) -> None:
    slot[:] = value


@contextmanager
def open_kept(tier: Tier, directory: Path, redis_url: str) -> Iterator[Kept]:
    size = CODEC.encoded_bytes
    budget = CAPACITY * size + size // 2
    match tier:
        case Tier.HOST:
            arena = memoryview(bytearray(CAPACITY * size))
            yield Kept(lambda on_change: HostStore(arena, size, on_change=on_change))
            return
        case Tier.DISK:
            kept = Kept(
                lambda on_change: DiskStore(
                    directory, tag=CODEC.tag, encoded_bytes=size, budget_bytes=budget, ttl_s=60, on_change=on_change
                )
            )
        case _:
            cell = a_cell()
            kept = Kept(
                lambda on_change: RedisStore(
                    RedisThread(redis_url, cell=cell),
                    cell=cell,
                    layout=CODEC.tag,
                    encoded_bytes=size,
                    budget_bytes=budget,
                    ttl_s=60,
                    on_change=on_change,
                )
            )
    yield kept
    kept.store.close()  # type: ignore[attr-defined]


@pytest.fixture(params=LOWER_TIERS)
def kept(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> Iterator[Kept]:
    with open_kept(request.param, tmp_path, redis_url) as opened:
        yield opened


def test_what_was_put_can_be_had(kept: Kept) -> None:
    assert not kept.has(1)
    assert kept.put(1)
    assert kept.has(1)
    assert not kept.has(2)
    assert kept.store.holds(hashes(3)) == [False, True, False]
    assert kept.store.contents() == [a_hash(1)]
    assert (kept.store.num_units, kept.store.num_bytes) == (1, CODEC.encoded_bytes)
    assert kept.twin == {a_hash(1)}


def test_putting_again_changes_nothing(kept: Kept) -> None:
    assert kept.put(1)
    assert kept.put(1)
    assert kept.has(1)
    assert kept.store.num_units == 1


def test_a_full_store_makes_room_and_says_so(kept: Kept) -> None:
    for number in range(2 * CAPACITY):
        assert kept.put(number)
    assert [number for number in range(2 * CAPACITY) if kept.has(number)] == list(range(CAPACITY, 2 * CAPACITY))
    assert kept.twin == set(hashes(CAPACITY, CAPACITY)) == set(kept.store.contents())


def test_what_was_dropped_is_gone(kept: Kept) -> None:
    kept.put(1)
    kept.put(2)
    kept.store.drop(a_hash(1))
    kept.store.drop(a_hash(9))
    assert not kept.has(1)
    assert kept.has(2)
    assert kept.twin == {a_hash(2)}
    assert kept.put(1)
    assert kept.has(1)
    assert kept.twin == {a_hash(1), a_hash(2)}


def test_nothing_is_left_after_clear_and_it_can_be_used_again(kept: Kept) -> None:
    kept.put(1)
    kept.put(2)
    kept.store.clear()
    assert not kept.has(1)
    assert kept.store.holds([a_hash(1), a_hash(2)]) == [False, False]
    assert kept.twin == set()
    kept.put(2)
    assert kept.has(2)
    assert not kept.has(1)
    assert kept.twin == {a_hash(2)}


def test_threads_may_read_and_drop_while_one_puts(kept: Kept) -> None:
    """Every read gives the whole unit or nothing, whatever is evicted under it."""
    over = threading.Event()
    broken: list[BaseException] = []

    def read(step: int) -> None:
        number = 0
        try:
            while not over.is_set():
                number = (number + step) % 12
                kept.has(number)
                if number == 5:
                    kept.store.drop(a_hash(number))
        except BaseException as error:
            broken.append(error)

    readers = [threading.Thread(target=read, args=(step,)) for step in (5, 7)]
    for reader in readers:
        reader.start()
    for number in range(240):
        kept.put(number % 12)
    over.set()
    for reader in readers:
        reader.join()
    assert broken == []
    assert kept.twin == set(kept.store.contents())
    assert kept.store.num_units <= CAPACITY
