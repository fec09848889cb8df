"""Units below the pages: saved before a page's next owner writes, brought back, and given to others."""

from __future__ import annotations

import pytest

from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.transports import GRPC, SHM
from tests.transfer.fake_tiers import FakeTiers
from tests.transfer.peers import EXPECTED, HASHES, PROMPT, peer
from tests.worker.fake_runner import FakeRunner
from tests.worker.plans import chunk, grant, plan
from tests.worker.test_executor import Client
from wire.plan import Tier, TierUnits

OTHER = list(range(300, 440))


async def test_what_a_page_held_is_saved_and_told_before_its_next_owner_writes() -> None:
    runner = FakeRunner()
    tiers = FakeTiers(runner.kv)
    async with peer(runner, tiers=tiers) as worker:
        await worker.compute()
        await worker.compute(OTHER[:40], seq=2, first_page=2)
        assert await worker.client.tier_units() == TierUnits(Tier.HOST, HASHES[2:5])
        assert (await Client(worker.worker.executor).open()).tiers == [TierUnits(Tier.HOST, HASHES[2:5])]


@pytest.mark.parametrize("page_size", [16, 64])
async def test_units_come_back_from_this_workers_own_tiers(page_size: int) -> None:
    runner = FakeRunner(page_size=page_size)
    tiers = FakeTiers(runner.kv)
    async with peer(runner, tiers=tiers) as worker:
        await worker.compute()
        await worker.compute(OTHER, seq=2)
        [report] = await worker.pull(worker.pull_from(worker, first_page=20))
        assert (report.num_units, report.failure, report.transport) == (8, None, "host")
        assert await worker.continue_from(128, first_page=20) == EXPECTED


async def test_a_unit_that_is_damaged_or_gone_ends_the_pull_there() -> None:
    runner = FakeRunner()
    tiers = FakeTiers(runner.kv)
    async with peer(runner, tiers=tiers) as worker:
        await worker.compute()
        await worker.compute(OTHER, seq=2)
        tiers.unreadable.add(HASHES[5])
        [report] = await worker.pull(worker.pull_from(worker, first_page=20))
        assert (report.num_units, report.failure) == (5, "unit 5 of 8: in none of this worker's tiers")
        assert await worker.continue_from(80, first_page=20) == EXPECTED


@pytest.mark.parametrize("transport", [SHM, GRPC])
async def test_a_source_gives_what_it_has_above_and_below(transport: str) -> None:
    runner = FakeRunner()
    tiers = FakeTiers(runner.kv)
    async with (
        peer(runner, worker_id="source", tiers=tiers, transports=(transport,)) as source,
        peer(worker_id="target", transports=(transport,)) as target,
    ):
        await source.compute()
        await source.compute(OTHER[:40], seq=2, first_page=2)  # units 2, 3 and 4 go below
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, report.failure, report.transport) == (8, None, transport)
        assert await target.continue_from(128) == EXPECTED
        tiers.unreadable.add(HASHES[3])
        [partial] = await target.pull(target.pull_from(source, first_page=30))
        assert partial.num_units == 3
        assert partial.failure is not None and partial.failure.endswith("unit 3: no longer in a lower tier")
        assert await target.continue_from(48, first_page=30) == EXPECTED


async def test_a_worker_without_tiers_pulls_nothing_from_itself() -> None:
    async with peer() as worker:
        [report] = await worker.pull(worker.pull_from(worker))
        assert report.failure == "this worker has no lower tiers"


async def test_a_failed_step_clears_them() -> None:
    runner = FakeRunner()
    tiers = FakeTiers(runner.kv)
    async with peer(runner, tiers=tiers) as worker:
        await worker.compute()
        await worker.compute(OTHER, seq=2)

        def fail(batch: StepBatch) -> None:
            raise RuntimeError("device lost")

        runner.before_forward = fail
        await worker.client.run(plan(50, chunks=[chunk(9, 0, 4, tokens=PROMPT[:4], pages=grant([40], 16))]))
        assert (await Client(worker.worker.executor).open()).tiers == []
