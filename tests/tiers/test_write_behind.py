from __future__ import annotations

import threading

import pytest
from prometheus_client import CollectorRegistry

from gpu_worker.tiers import write_behind
from gpu_worker.tiers.port import StoredUnit
from gpu_worker.tiers.write_behind import WriteBehind
from observability.tier_metrics import TierMetrics
from tests.tiers.units import a_hash, hashes
from wire.ids import UnitHash
from wire.plan import Tier

TIMEOUT_S = 10.0


class GatedStore:
    """A store whose puts wait for a gate, and may fail."""

    tier = Tier.DISK

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.held: list[UnitHash] = []
        self.failing = False
        self.upkeeps = threading.Semaphore(0)

    def put(self, unit_hash: UnitHash, encoded: memoryview) -> bool:
        self.entered.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        if self.failing:
            raise RuntimeError("a defect")
        self.held.append(unit_hash)
        return True

    def clear(self) -> None:
        self.held.clear()

    def upkeep(self) -> None:
        self.upkeeps.release()

    def get(self, unit_hash: UnitHash) -> StoredUnit | None:
        raise NotImplementedError

    def holds(self, unit_hashes: object) -> list[bool]:
        raise NotImplementedError

    def drop(self, unit_hash: UnitHash) -> None:
        raise NotImplementedError

    def contents(self) -> list[UnitHash]:
        return self.held

    @property
    def num_units(self) -> int:
        return len(self.held)

    @property
    def num_bytes(self) -> int:
        return 0

    def close(self) -> None:
        raise NotImplementedError


class Offered:
    """Units offered to a writer, and whether they were released."""

    def __init__(self, writer: WriteBehind) -> None:
        self._writer = writer
        self.released: list[int] = []

    def offer(self, number: int) -> None:
        self._writer.offer(a_hash(number), StoredUnit(memoryview(b"x"), lambda: self.released.append(number)))


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def writer(registry: CollectorRegistry) -> WriteBehind:
    return WriteBehind(GatedStore(), TierMetrics(registry))


def store_of(writer: WriteBehind) -> GatedStore:
    assert isinstance(writer.store, GatedStore)
    return writer.store


def test_units_are_written_in_order_and_released(writer: WriteBehind) -> None:
    offered, store = Offered(writer), store_of(writer)
    writer.start()
    for number in range(3):
        offered.offer(number)
    assert not writer.flush(timeout_s=0.01)
    store.gate.release(3)
    assert writer.flush(TIMEOUT_S)
    assert (store.held, offered.released) == (hashes(3), [0, 1, 2])
    writer.stop()


def test_after_clear_nothing_that_was_offered_before_is_held(writer: WriteBehind) -> None:
    offered, store = Offered(writer), store_of(writer)
    writer.start()
    for number in range(3):
        offered.offer(number)
    assert store.entered.acquire(timeout=TIMEOUT_S)  # one is being written, two wait
    clearing = threading.Thread(target=writer.clear)
    clearing.start()
    store.gate.release(3)
    clearing.join(TIMEOUT_S)
    assert store.held == []
    assert sorted(offered.released) == [0, 1, 2]
    store.gate.release()
    offered.offer(4)
    assert writer.flush(TIMEOUT_S)
    assert store.held == [a_hash(4)]
    writer.stop()


def test_what_was_cleared_is_removed_at_once_and_before_the_writer_stops(
    writer: WriteBehind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "UPKEEP_INTERVAL_S", 1e6)
    store = store_of(writer)
    writer.start()
    assert store.upkeeps.acquire(timeout=TIMEOUT_S), "the one at start"
    writer.clear()
    assert store.upkeeps.acquire(timeout=TIMEOUT_S)
    with writer._changed:  # so that its thread sees both at once
        writer.clear()
        writer._stopping = True
    writer.stop()
    assert store.upkeeps.acquire(blocking=False)


def test_a_store_that_raises_loses_a_unit_and_not_its_thread(writer: WriteBehind) -> None:
    offered, store = Offered(writer), store_of(writer)
    writer.start()
    store.failing = True
    store.gate.release(2)
    offered.offer(1)
    assert writer.flush(TIMEOUT_S)
    store.failing = False
    offered.offer(2)
    assert writer.flush(TIMEOUT_S)
    assert (store.held, offered.released) == ([a_hash(2)], [1, 2])
    assert store.upkeeps.acquire(timeout=TIMEOUT_S)
    writer.stop()


def test_what_is_offered_to_a_stopped_writer_is_released(writer: WriteBehind, registry: CollectorRegistry) -> None:
    offered, store = Offered(writer), store_of(writer)
    writer.start()
    offered.offer(1)
    offered.offer(2)
    assert store.entered.acquire(timeout=TIMEOUT_S)
    store.gate.release()
    writer.stop()
    offered.offer(3)
    assert sorted(offered.released) == [1, 2, 3]
    assert store.held == [a_hash(1)]
    assert registry.get_sample_value("phasemesh_worker_tier_saved_units_total", {"tier": "disk"}) == 1
