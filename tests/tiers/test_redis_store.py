"""One cell's units in a real Redis: shared, budgeted, gone by themselves, never waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from redis import Redis

from gpu_worker.tiers.redis_store import RETRY_AFTER_S, RedisStore
from gpu_worker.tiers.redis_thread import RedisThread
from gpu_worker.tiers.unit_codec import LowerTierDtype, UnitCodec
from tests.redis_fixture import RedisServer
from tests.tiers.units import CODEC, a_cell, a_codec, a_hash, encoded, hashes
from wire import keys
from wire.ids import UnitHash

SIZE = CODEC.encoded_bytes


@pytest.fixture
def cell() -> str:
    return a_cell()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as client:
        yield client


@contextmanager
def opened(
    url: str,
    cell: str,
    *,
    units: float = 8,
    ttl_s: float = 60,
    codec: UnitCodec = CODEC,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[RedisStore, set[UnitHash]]]:
    """A store, and the twin of its contents."""
    twin: set[UnitHash] = set()

    def changed(unit_hash: UnitHash, is_here: bool) -> None:
        (twin.add if is_here else twin.remove)(unit_hash)

    store = RedisStore(
        RedisThread(url, cell=cell),
        cell=cell,
        layout=codec.tag,
        encoded_bytes=codec.encoded_bytes,
        budget_bytes=int(units * SIZE),
        ttl_s=ttl_s,
        on_change=changed,
        clock=clock,
    )
    try:
        store.upkeep()  # as at start
        yield store, twin
    finally:
        store.close()


def key(cell: str, number: int) -> str:
    return keys.kv_unit(cell, f"{CODEC.tag}:{a_hash(number).hex()}")


def test_any_worker_of_the_cell_reads_what_another_stored(redis_url: str, cell: str) -> None:
    with opened(redis_url, cell) as (one, _), opened(redis_url, cell) as (two, told):
        one.put(a_hash(1), encoded(1))
        unit = two.get(a_hash(1))
        assert unit is not None
        assert CODEC.decode(a_hash(1), unit.encoded) is not None
        assert two.holds(hashes(3)) == [False, True, False]
        assert told == set(), "it is in another worker's report"
        two.put(a_hash(1), encoded(1))
        assert told == {a_hash(1)}


def test_the_key_alone_says_that_a_unit_is_there(redis_url: str, redis: Redis, cell: str) -> None:
    with opened(redis_url, cell) as (store, told):
        store.put(a_hash(1), encoded(1))
        assert redis.get(key(cell, 1)) == bytes(encoded(1))
        redis.delete(keys.kv_order(cell), keys.kv_total(cell))
        assert store.get(a_hash(1)) is not None
        redis.delete(key(cell, 1))
        assert store.get(a_hash(1)) is None
        assert told == set()


def test_the_budget_is_the_cells(redis_url: str, redis: Redis, cell: str) -> None:
    with opened(redis_url, cell, units=4.5) as (one, told_one), opened(redis_url, cell, units=4.5) as (two, told_two):
        for number in range(12):
            (one, two)[number % 2].put(a_hash(number), encoded(number))
            there = [n for n in range(12) if redis.exists(key(cell, n))]
            assert there == list(range(max(0, number - 3), number + 1))
            assert int(redis.get(keys.kv_total(cell)) or 0) == len(there) * SIZE
        assert told_two == {a_hash(9), a_hash(11)}, "who stores learns at once what went"
        one.upkeep()
        assert (told_one, told_two) == ({a_hash(8), a_hash(10)}, {a_hash(9), a_hash(11)})


def test_a_unit_is_gone_when_its_time_is_up(redis_url: str, redis: Redis, cell: str) -> None:
    with opened(redis_url, cell, ttl_s=0.2) as (store, told):
        store.put(a_hash(1), encoded(1))
        assert 0 < redis.pttl(key(cell, 1)) <= 200
        deadline_s = time.monotonic() + 10
        while told or redis.exists(key(cell, 1)):
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
            store.upkeep()
        assert store.get(a_hash(1)) is None
        store.put(a_hash(2), encoded(2))
        assert redis.zcard(keys.kv_order(cell)) == 1
        assert int(redis.get(keys.kv_total(cell)) or 0) == SIZE
    for name in (keys.kv_order(cell), keys.kv_total(cell)):
        assert 0 < redis.pttl(name) <= 200


def test_a_unit_larger_than_the_budget_is_refused_and_costs_nobody(redis_url: str, redis: Redis, cell: str) -> None:
    with opened(redis_url, cell) as (large, _), opened(redis_url, cell, units=0.5) as (small, told):
        large.put(a_hash(1), encoded(1))
        assert not small.put(a_hash(2), encoded(2))
        assert told == set()
        assert large.get(a_hash(1)) is not None


def test_a_unit_that_redis_itself_evicted_is_stored_again_and_counted_once(
    redis_url: str, redis: Redis, cell: str
) -> None:
    with opened(redis_url, cell) as (store, told):
        store.put(a_hash(1), encoded(1))
        redis.delete(key(cell, 1))
        store.put(a_hash(1), encoded(1))
        assert told == {a_hash(1)}
        assert redis.exists(key(cell, 1))
        assert redis.zcard(keys.kv_order(cell)) == 1
        assert int(redis.get(keys.kv_total(cell)) or 0) == SIZE


def test_a_lost_sum_is_made_again(redis_url: str, redis: Redis, cell: str) -> None:
    with opened(redis_url, cell, units=3) as (store, _):
        for number in range(3):
            store.put(a_hash(number), encoded(number))
        redis.delete(keys.kv_total(cell))
        store.put(a_hash(3), encoded(3))
        assert [n for n in range(4) if redis.exists(key(cell, n))] == [1, 2, 3]
        assert int(redis.get(keys.kv_total(cell)) or 0) == 3 * SIZE


def test_a_restarted_worker_finds_what_lies_there_of_its_layout(redis_url: str, cell: str) -> None:
    int8 = a_codec(LowerTierDtype.INT8)
    with opened(redis_url, cell) as (store, _), opened(redis_url, cell, codec=int8) as (other, _):
        store.put(a_hash(1), encoded(1))
        other.put(a_hash(2), encoded(2, int8))
        other.put(a_hash(1), encoded(1, int8))
    with opened(redis_url, cell) as (again, told):
        assert told == {a_hash(1)}
        again.clear()  # of this worker's own, it has stored nothing
        assert again.get(a_hash(1)) is not None


def test_a_damaged_unit_that_was_dropped_can_be_stored_again(redis_url: str, redis: Redis, cell: str) -> None:
    with opened(redis_url, cell) as (store, told):
        store.put(a_hash(1), encoded(1))
        redis.setrange(key(cell, 1), 500, b"\0\0\0\0")
        store.drop(a_hash(1))
        assert (told, store.get(a_hash(1))) == (set(), None)
        store.upkeep()
        assert not redis.exists(key(cell, 1))
        assert int(redis.get(keys.kv_total(cell)) or 0) == 0
        store.put(a_hash(1), encoded(1))
        assert redis.get(key(cell, 1)) == bytes(encoded(1))


def test_foreign_values_under_our_names_are_left_alone(redis_url: str, redis: Redis, cell: str) -> None:
    redis.set(keys.kv_order(cell), "mine")
    with opened(redis_url, cell) as (store, told):
        assert not store.put(a_hash(1), encoded(1))
        store.upkeep()
        assert told == set()
    assert redis.get(keys.kv_order(cell)) == b"mine"


def test_while_redis_is_away_everything_is_a_miss_at_once(
    redis_server: RedisServer, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = 0

    async def connects(*args: object) -> None:
        nonlocal asked
        asked += 1

    now_s = 0.0
    with opened(redis_server.url, cell, clock=lambda: now_s) as (store, told):
        store.put(a_hash(1), encoded(1))
        redis_server.kill()
        assert store.get(a_hash(1)) is None
        monkeypatch.setattr("redis.asyncio.Connection.connect", connects)
        assert store.get(a_hash(1)) is None
        assert store.holds(hashes(2)) == [False, False]
        assert not store.put(a_hash(2), encoded(2))
        store.upkeep()
        assert asked == 0, "asked again before its time"
        monkeypatch.undo()
        now_s += RETRY_AFTER_S
        redis_server.start()  # and it has forgotten everything
        store.upkeep()
        assert told == set()
        assert store.put(a_hash(1), encoded(1))
        assert store.get(a_hash(1)) is not None


def test_a_flushed_redis_is_noticed(redis_server: RedisServer, cell: str) -> None:
    with opened(redis_server.url, cell) as (one, told_one), opened(redis_server.url, cell) as (two, _):
        one.put(a_hash(1), encoded(1))
        with Redis.from_url(redis_server.url) as redis:
            redis.flushall()
        two.put(a_hash(2), encoded(2))
        one.upkeep()
        assert told_one == set()
