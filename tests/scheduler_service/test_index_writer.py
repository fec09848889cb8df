"""The index in Redis becomes what the twin is, whatever happens in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import pytest

from kvstore.prefix_index import Holder, Tiers
from kvstore.prefix_twin import PrefixTwin
from kvstore.redis_prefix_index import RedisPrefixIndex
from scheduler import index_writer
from scheduler.commands import UpdateIndex
from scheduler.index_writer import IndexWriter
from scheduler.redis_io import REDIS_ERRORS
from tests.redis_fixture import RedisServer
from tests.scheduler_service.parts import CELL, Parts, until
from wire import keys
from wire.errors import FenceLost
from wire.ids import Epoch, UnitHash, WorkerId
from wire.plan import Tier

W1 = Holder(WorkerId("w1"), Epoch(1))
W1_AGAIN = Holder(WorkerId("w1"), Epoch(2))
UNITS = [UnitHash(i.to_bytes(32, "big")) for i in range(6000)]


class CountingIndex(RedisPrefixIndex):
    """Remembers how large its writes were."""

    sizes: list[int]

    async def write(self, holder: Holder, units: Mapping[UnitHash, Tiers], *, anew: bool = False) -> bool:
        self.sizes.append(len(units))
        return await super().write(holder, units, anew=anew)


class Cell:
    """An engine's part in this: the twin, and a command for each change of it."""

    def __init__(self, parts: Parts) -> None:
        self.twin = PrefixTwin()
        self.index = CountingIndex(parts.redis, CELL, fence=parts.fence)
        self.index.sizes = []
        self.writer = IndexWriter(self.index, self.twin, parts.lease)

    def change(
        self, holder: Holder, *, stored: list[UnitHash] | None = None, dropped: list[UnitHash] | None = None,
        tier: Tier = Tier.DEVICE, fresh: bool = False,
    ) -> None:  # fmt: skip
        if fresh:
            self.twin.drop_worker(holder.worker_id)
        self.twin.remove(holder.worker_id, dropped or [], tier)
        self.twin.add(holder.worker_id, stored or [], tier)
        self.writer.update(UpdateIndex(*_ids(holder), tier, stored or [], dropped or [], fresh))

    def down(self, holder: Holder) -> None:
        self.twin.drop_worker(holder.worker_id)
        self.writer.worker_down(*_ids(holder))

    async def in_redis(self, holder: Holder) -> dict[UnitHash, Tiers]:
        found: dict[UnitHash, Tiers] = {}
        async for part in self.index.units(holder):
            found |= part
        return found

    def in_twin(self, holder: Holder) -> dict[UnitHash, Tiers]:
        worker_id = holder.worker_id
        return {unit_hash: self.twin.tiers(worker_id, unit_hash) for unit_hash in self.twin.hashes(worker_id)}

    def agrees(self, holder: Holder) -> Callable[[], Awaitable[bool]]:
        async def same() -> bool:
            return await self.in_redis(holder) == self.in_twin(holder)

        return same

    def is_gone(self, holder: Holder) -> Callable[[], Awaitable[bool]]:
        async def gone() -> bool:
            return not await self.in_redis(holder)

        return gone


def _ids(holder: Holder) -> tuple[WorkerId, Epoch]:
    return holder.worker_id, holder.epoch


@asynccontextmanager
async def writing(cell: Cell) -> AsyncIterator[None]:
    task = asyncio.create_task(cell.writer.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def cell(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cell]:
    """Writing all the while."""
    monkeypatch.setattr(index_writer, "COLLECT_S", 0.01)
    monkeypatch.setattr(index_writer, "CHECK_S", 0.05)
    made = Cell(parts)
    async with writing(made):
        yield made


async def test_changes_reach_redis_in_bounded_batches(cell: Cell) -> None:
    cell.change(W1, stored=UNITS, fresh=True)
    await until(cell.agrees(W1))
    cell.change(W1, stored=UNITS[:10], tier=Tier.HOST)
    cell.change(W1, dropped=UNITS[5:4000])
    await until(cell.agrees(W1))
    assert set(await cell.in_redis(W1)) == {*UNITS[:10], *UNITS[4000:]}
    assert max(cell.index.sizes) <= index_writer.MAX_WRITE_UNITS
    assert sum(cell.index.sizes) < 2 * len(UNITS)


async def test_changes_of_one_moment_are_one_write(cell: Cell) -> None:
    cell.change(W1, fresh=True)
    for unit_hash in UNITS[:500]:
        cell.change(W1, stored=[unit_hash])
        cell.change(W1, dropped=[unit_hash])
        cell.change(W1, stored=[unit_hash])
    await until(cell.agrees(W1))
    assert [size for size in cell.index.sizes if size] == [500]


async def test_any_order_of_changes_ends_as_the_twin(cell: Cell) -> None:
    draws = random.Random(7)
    cell.change(W1, fresh=True)
    for _ in range(300):
        some = draws.sample(UNITS[:300], 20)
        tier = draws.choice(list(Tier))
        cell.change(W1, stored=some[:10], dropped=some[10:], tier=tier)
        if draws.random() < 0.2:
            await asyncio.sleep(draws.random() * 0.01)
    await until(cell.agrees(W1))
    assert await cell.in_redis(W1)


async def test_a_new_epoch_takes_the_place_of_the_old_one(cell: Cell) -> None:
    cell.change(W1, stored=UNITS[:5], fresh=True)
    await until(cell.agrees(W1))
    cell.change(W1_AGAIN, stored=UNITS[3:8], fresh=True)
    await until(cell.agrees(W1_AGAIN))
    await until(cell.is_gone(W1))


async def test_a_new_session_of_the_same_epoch_voids_what_was_written_before(cell: Cell) -> None:
    cell.change(W1, stored=UNITS[:5], fresh=True)
    await until(cell.agrees(W1))
    cell.change(W1, stored=UNITS[3:8], fresh=True)
    await until(cell.agrees(W1))
    assert set(await cell.in_redis(W1)) == set(UNITS[3:8])


async def test_a_worker_that_is_down_is_forgotten_but_not_its_successor(cell: Cell) -> None:
    cell.change(W1, stored=UNITS[:5], fresh=True)
    await until(cell.agrees(W1))
    cell.down(W1)
    await until(cell.is_gone(W1))
    cell.change(W1_AGAIN, stored=UNITS[:3], fresh=True)
    cell.writer.worker_down(*_ids(W1))  # late
    await until(cell.agrees(W1_AGAIN))
    assert len(await cell.in_redis(W1_AGAIN)) == 3


async def test_after_an_outage_all_is_written_anew(cell: Cell, redis_server: RedisServer, parts: Parts) -> None:
    cell.change(W1, stored=UNITS[:100], fresh=True)
    await until(cell.agrees(W1))
    redis_server.kill()
    cell.change(W1, stored=UNITS[100:200], dropped=UNITS[:10])
    await asyncio.sleep(0.1)
    cell.change(W1, dropped=UNITS[10:20])
    redis_server.start()  # it forgot everything, our fence too
    await until(_renews(parts))
    await until(cell.agrees(W1))
    assert set(await cell.in_redis(W1)) == set(UNITS[20:200])


def _renews(parts: Parts) -> Callable[[], Awaitable[bool]]:
    async def renewed() -> bool:
        try:
            await parts.lease.confirm()
        except REDIS_ERRORS:
            return False
        return True

    return renewed


async def test_what_lapsed_meanwhile_is_noticed_without_any_change(cell: Cell, parts: Parts) -> None:
    cell.change(W1, stored=UNITS[:100], fresh=True)
    await until(cell.agrees(W1))
    await parts.redis.delete(keys.prefixes(CELL, *_ids(W1)))
    await until(cell.agrees(W1))


async def test_what_lapsed_meanwhile_is_not_half_written(cell: Cell, parts: Parts) -> None:
    cell.change(W1, stored=UNITS[:100], fresh=True)
    await until(cell.agrees(W1))
    await parts.redis.delete(keys.prefixes(CELL, *_ids(W1)))
    cell.change(W1, stored=UNITS[100:101])
    await until(cell.agrees(W1))
    assert len(await cell.in_redis(W1)) == 101


async def test_too_many_changes_at_once_become_one_rewrite(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_writer, "MAX_CHANGED", 100)
    cell = Cell(parts)
    cell.change(W1, stored=UNITS[:50], fresh=True)
    async with writing(cell):
        await until(cell.agrees(W1))
    cell.change(W1, dropped=UNITS[:50])
    cell.change(W1, stored=UNITS[50:201])
    async with writing(cell):
        await until(cell.agrees(W1))
    assert set(await cell.in_redis(W1)) == set(UNITS[50:201])


async def test_somebody_else_s_key_costs_one_worker_and_stays(
    cell: Cell, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    other = Holder(WorkerId("w2"), Epoch(1))
    key = keys.prefixes(CELL, *_ids(W1))
    await parts.redis.set(key, "x")
    cell.change(W1, stored=UNITS[:5], fresh=True)
    cell.change(other, stored=UNITS[:5], fresh=True)
    await until(cell.agrees(other))
    for unit_hash in UNITS[5:10]:
        cell.change(W1, stored=[unit_hash])
        cell.change(other, stored=[unit_hash])
        await until(cell.agrees(other))
    assert await parts.redis.get(key) == b"x"
    assert caplog.text.count("the prefix index goes without w1") == 1
    await parts.redis.delete(key)
    cell.change(W1, stored=UNITS[:5], fresh=True)
    await until(cell.agrees(W1))


async def test_a_scheduler_that_was_fenced_out_writes_no_more(parts: Parts) -> None:
    cell = Cell(parts)
    cell.change(W1, stored=UNITS[:5], fresh=True)
    await parts.redis.set(keys.fence(CELL), parts.fence + 1)
    await parts.redis.set(keys.lease(CELL), "another")
    with pytest.raises(FenceLost, match="another scheduler is active"):
        await asyncio.wait_for(cell.writer.run(), 5)
    assert await cell.in_redis(W1) == {}


async def test_a_repair_writes_what_the_twin_says(cell: Cell, parts: Parts) -> None:
    cell.change(W1, stored=UNITS[:5], fresh=True)
    await until(cell.agrees(W1))
    await parts.redis.hset(keys.prefixes(CELL, *_ids(W1)), mapping={UNITS[0]: "h", UNITS[9]: "d"})
    cell.writer.repair(W1, [UNITS[0], UNITS[9]])
    await until(cell.agrees(W1))
    cell.writer.repair(W1_AGAIN, UNITS[:1])  # of another epoch: not ours to write
    await asyncio.sleep(0.05)
    assert await cell.in_redis(W1_AGAIN) == {}


async def test_what_is_being_written_is_on_its_way_too(parts: Parts) -> None:
    cell = Cell(parts)
    entered, released = asyncio.Event(), asyncio.Event()
    write = cell.index.write

    async def slow_write(holder: Holder, units: Mapping[UnitHash, Tiers], *, anew: bool = False) -> bool:
        entered.set()
        await released.wait()
        return await write(holder, units, anew=anew)

    cell.index.write = slow_write  # type: ignore[method-assign]
    cell.change(W1, stored=UNITS[:5], fresh=True)
    async with writing(cell):
        await entered.wait()
        with cell.writer.moving(W1) as moving:
            assert moving == set(UNITS[:5])
        released.set()
        await until(cell.agrees(W1))


async def test_what_is_on_its_way_while_somebody_looks_is_told(cell: Cell, parts: Parts) -> None:
    with cell.writer.moving(W1) as moving:
        assert moving is None  # nothing was written yet
    cell.change(W1, stored=UNITS[:5], fresh=True)
    await until(cell.agrees(W1))

    async def nothing_moves() -> bool:
        with cell.writer.moving(W1) as moving:
            return moving == set()

    await until(nothing_moves)  # Redis has it before the writer has heard so
    cell.change(W1, stored=UNITS[5:7])
    with cell.writer.moving(W1) as moving:
        assert moving == set(UNITS[5:7])
        await until(cell.agrees(W1))
        cell.change(W1, dropped=UNITS[:1])
        assert moving == {*UNITS[5:7], UNITS[0]}
        await until(cell.agrees(W1))
        await parts.redis.delete(keys.prefixes(CELL, *_ids(W1)))
        await until(cell.agrees(W1))
        assert moving == set(UNITS[:7])
    with cell.writer.moving(W1_AGAIN) as moving:
        assert moving is None
