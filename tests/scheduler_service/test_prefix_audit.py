"""What twin, Redis and worker say of the same units is compared, exported and set right."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest

from kvstore.prefix_index import Holder
from scheduler import index_writer, prefix_audit
from scheduler.events import ResidencyAudited
from scheduler.prefix_audit import PrefixAudit, list_units
from scheduler.worker_registry import WorkerSession
from tests.redis_fixture import RedisServer
from tests.scheduler_service.client import gateway
from tests.scheduler_service.parts import CELL, Parts, request_entry, until
from tests.scheduler_service.scripted_worker import ScriptedWorker, register, serve
from tests.scheduler_service.test_index_writer import UNITS, Cell, writing
from tests.scheduler_service.test_scheduler import scheduler
from wire import keys
from wire.ids import Epoch, PageId, UnitHash, WorkerId
from wire.plan import PageUnits, Residents, Tier, TierUnits
from wire.redis_client import open_redis

W1 = Holder(WorkerId("w1"), Epoch(1))
KEY = keys.prefixes(CELL, W1.worker_id, W1.epoch)


class Worker:
    """Says what the test has it say."""

    def __init__(self) -> None:
        self.pages: dict[int, list[UnitHash]] = {}
        self.tiers: dict[Tier, list[UnitHash]] = {}
        self.error: Exception | None = None
        self.is_live = True

    def sessions(self) -> list[WorkerSession]:
        return [WorkerSession(W1, "host:1")] if self.is_live else []

    async def list(self, address: str, epoch: Epoch) -> AsyncIterator[Residents]:
        assert (address, epoch) == ("host:1", W1.epoch)
        if self.error is not None:
            raise self.error
        for page, units in self.pages.items():
            yield Residents([PageUnits(PageId(page), units)])
        yield Residents([], [TierUnits(tier, units) for tier, units in self.tiers.items()])


class Audited(Cell):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self.parts = parts
        self.worker = Worker()
        self.audit = PrefixAudit(
            self.index, self.twin, self.writer, self.worker.sessions, parts.inbox, parts.metrics,
            period_s=0.01, list_units=self.worker.list,
        )  # fmt: skip

    def holds(self, units: list[UnitHash]) -> None:
        """Twin, Redis (soon) and worker agree: these lie in pages of four."""
        self.change(W1, stored=units, fresh=True)
        self.worker.pages = {i // 4: units[i : i + 4] for i in range(0, len(units), 4)}

    def drift(self) -> tuple[float, float, float]:
        """twin-redis, twin-worker, worker-twin."""
        values = [self.sample("drift", between=b) for b in ("twin-redis", "twin-worker", "worker-twin")]
        return values[0], values[1], values[2]

    def sample(self, name: str, **labels: str) -> float:
        value = self.parts.metrics.registry.get_sample_value(
            f"phasemesh_prefix_index_{name}", {"worker": "w1", **labels}
        )
        assert value is not None
        return value

    def events(self) -> list[ResidencyAudited]:
        return [event for event in self.parts.events() if isinstance(event, ResidencyAudited)]


@pytest.fixture
async def cell(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Audited]:
    monkeypatch.setattr(index_writer, "COLLECT_S", 0.0)
    monkeypatch.setattr(prefix_audit, "SLICE_UNITS", 7)
    made = Audited(parts)
    async with writing(made):
        yield made


async def test_where_all_agree_there_is_no_drift(cell: Audited) -> None:
    cell.holds(UNITS[:2500])
    cell.change(W1, stored=UNITS[2400:2600], tier=Tier.HOST)
    cell.worker.tiers = {Tier.HOST: UNITS[2400:2600]}
    await until(cell.agrees(W1))
    for _ in range(2):
        await cell.audit.audit()
        assert cell.drift() == (0, 0, 0)
    assert cell.sample("units") == 2600
    assert cell.events() == []


async def test_redis_is_set_right_from_the_twin(cell: Audited) -> None:
    cell.holds(UNITS[:40])
    await until(cell.agrees(W1))
    await cell.parts.redis.hdel(KEY, *UNITS[:3])
    await cell.parts.redis.hset(KEY, mapping={UNITS[5]: "h", UNITS[100]: "d", "foreign": "d"})
    await cell.audit.audit()
    assert cell.drift() == (5, 0, 0)
    assert cell.sample("repairs_total", **{"in": "redis"}) == 5
    await until(cell.agrees(W1))
    await cell.audit.audit()
    assert cell.drift() == (0, 0, 0)
    assert await cell.parts.redis.hget(KEY, "foreign") == b"d"
    assert cell.events() == []


async def test_what_is_not_written_yet_is_no_drift(parts: Parts) -> None:
    cell = Audited(parts)
    cell.holds(UNITS[:40])
    async with writing(cell):
        await until(cell.agrees(W1))
    cell.change(W1, stored=UNITS[40:50], dropped=UNITS[:10])
    cell.worker.pages = {0: UNITS[10:50]}
    await cell.audit.audit()
    assert cell.drift() == (0, 0, 0)
    assert len(await cell.in_redis(W1)) == 40


async def test_the_engine_is_told_what_differs_from_the_worker_twice(cell: Audited) -> None:
    cell.holds(UNITS[:40])
    await until(cell.agrees(W1))
    lost, found, below = UNITS[4:6], UNITS[100], UNITS[101]
    cell.worker.pages[1] = UNITS[6:8]
    cell.worker.pages[50] = [found]
    cell.worker.tiers = {Tier.DISK: [below, UNITS[200]]}
    await cell.audit.audit()
    assert cell.drift() == (0, 0, 0)  # it may be on its way
    assert cell.events() == []
    cell.worker.tiers = {Tier.DISK: [below, UNITS[201]]}
    await cell.audit.audit()
    assert cell.drift() == (0, 2, 2)
    [event] = cell.events()
    assert (event.worker_id, event.epoch) == (W1.worker_id, W1.epoch)
    assert event.differing == {Tier.DEVICE: frozenset({*lost, found}), Tier.DISK: frozenset({below})}
    assert {page.page_id: page.unit_hashes for page in event.pages} == cell.worker.pages
    [disk] = event.tiers
    assert disk.tier is Tier.DISK and set(disk.stored) == {below, UNITS[201]}
    assert cell.sample("repairs_total", **{"in": "twin"}) == 4
    for unit_hash in lost:  # what the engine makes of it
        cell.change(W1, dropped=[unit_hash])
    cell.change(W1, stored=[found])
    cell.change(W1, stored=[below, UNITS[201]], tier=Tier.DISK)
    await cell.audit.audit()
    assert cell.drift() == (0, 0, 0)
    assert cell.events() == []


async def test_differences_of_an_earlier_epoch_or_session_are_not_counted(cell: Audited) -> None:
    cell.holds(UNITS[:40])
    cell.worker.pages = {}
    await cell.audit.audit()
    cell.worker.is_live = False
    await cell.audit.audit()
    cell.worker.is_live = True
    await cell.audit.audit()
    assert cell.drift() == (0, 0, 0)
    assert cell.events() == []


async def test_a_worker_that_does_not_answer_is_named_once_and_costs_nothing_else(
    cell: Audited, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = grpc.aio.Metadata()
    cell.worker.error = grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, nothing, nothing, "Method not found!")
    cell.holds(UNITS[:40])
    await until(cell.agrees(W1))
    await cell.parts.redis.hdel(KEY, *UNITS[:3])
    for _ in range(3):
        await cell.audit.audit()
    assert cell.sample("repairs_total", **{"in": "redis"}) >= 3
    assert caplog.text.count("w1 does not list its units: UNIMPLEMENTED: Method not found!") == 1
    cell.worker.error = None
    await cell.audit.audit()
    assert cell.drift()[1:] == (0, 0)


async def test_an_audit_outlives_redis(
    cell: Audited, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    cell.holds(UNITS[:4])
    await until(cell.agrees(W1))
    redis_server.kill()
    with caplog.at_level(logging.WARNING):
        await cell.audit.audit()
    assert "not audited" in caplog.text
    assert cell.sample("drift", between="twin-worker") == 0
    redis_server.start()


async def test_zero_never_audits(cell: Audited) -> None:
    never = PrefixAudit(
        cell.index, cell.twin, cell.writer, cell.worker.sessions, cell.parts.inbox, cell.parts.metrics, period_s=0
    )
    await asyncio.wait_for(never.run(), 1)


async def test_a_list_comes_over_grpc_for_its_own_epoch_only() -> None:
    worker = ScriptedWorker(epoch=5)
    async with serve(worker):
        assert [r async for r in list_units(worker.address, Epoch(5))] == []
        with pytest.raises(grpc.aio.AioRpcError, match="another epoch"):
            [r async for r in list_units(worker.address, Epoch(4))]


async def test_after_traffic_twin_redis_and_worker_agree(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole scheduler in front of a worker that evicts all the time."""
    num_audits = 0
    audit = PrefixAudit.audit

    async def counted(self: PrefixAudit) -> None:
        nonlocal num_audits
        await audit(self)
        num_audits += 1

    async def three_audits_later() -> None:
        seen = num_audits
        async with asyncio.timeout(10):
            while num_audits < seen + 3:  # noqa: ASYNC110  # one under way, and two that must differ both
                await asyncio.sleep(0.01)

    monkeypatch.setattr(PrefixAudit, "audit", counted)
    worker = ScriptedWorker(num_pages=12)
    async with open_redis(redis_server.url) as redis, serve(worker), gateway(redis_server.url) as client:
        await register(redis, CELL, worker)
        async with scheduler(redis_server, INDEX_AUDIT_S="0.05") as built:
            for i in range(12):
                prompt = [2 + (i * j) % 45 for j in range(90)]
                await (await client.submit(request_entry(f"r{i}", prompt))).finished_right()
            await three_audits_later()
            registry = built._metrics.registry
            drift = [
                registry.get_sample_value("phasemesh_prefix_index_drift", {"worker": "w1", "between": between})
                for between in ("twin-redis", "twin-worker", "worker-twin")
            ]
            assert drift == [0, 0, 0]
            assert registry.get_sample_value("phasemesh_prefix_index_units", {"worker": "w1"})
