"""What holds for every transport between two workers: one suite over shared memory, gRPC, and a stand-in for NIXL."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_worker.transfer.transports import GRPC, NIXL, SHM, choose_transport
from kvstore.prefix_hash import chain
from tests.transfer import fake_nixl
from tests.transfer.peers import EXPECTED, HASHES, PROMPT, two_peers
from tests.worker.fake_runner import reference_output
from tests.worker.plans import ROOT, chunk, grant, plan
from tests.worker.test_executor import tokens_of
from wire.ids import PageId
from wire.plan import PullReport

TRANSPORTS = [SHM, GRPC, NIXL]


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == NIXL:
        fake_nixl.install(monkeypatch)
    return name


def both(transport: str) -> dict[str, Any]:
    return {"source": {"transports": (transport,)}, "transports": (transport,)}


def summary(report: PullReport) -> tuple[bool, int, str | None, str]:
    return report.done, report.num_units, report.failure, report.transport


@pytest.mark.parametrize(("source_page", "target_page"), [(16, 16), (64, 64), (16, 64), (64, 16)])
async def test_pulled_units_are_what_the_target_would_have_computed(
    transport: str, source_page: int, target_page: int
) -> None:
    async with two_peers(source_page, target_page, **both(transport)) as (source, target):
        await source.compute(first_page=5)
        pull = target.pull_from(source, first_page=3)
        [report] = await target.pull(pull)
        assert summary(report) == (True, 8, None, transport)
        assert report.num_bytes == 8 * source.worker.unit_bytes
        assert target.resident() == set(HASHES)
        assert await target.continue_from(128, first_page=3) == EXPECTED


async def test_scattered_pages_are_copied_to_scattered_pages(transport: str) -> None:
    async with two_peers(16, 64, **both(transport)) as (source, target):
        whole = chunk(1, 0, 140, tokens=PROMPT, pages=grant([9, 2, 40, 41, 42, 7, 6, 5, 11], 140))
        await source.client.run(plan(1, chunks=[whole]))
        pull = target.pull_from(source)
        pull.target_pages[:] = [PageId(30), PageId(8)]
        [report] = await target.pull(pull)
        assert summary(report) == (True, 8, None, transport)
        rest = chunk(2, 128, 12, tokens=PROMPT, pages=grant([30, 8, 1], 160))
        assert tokens_of(await target.client.run(plan(9, chunks=[rest], max_steps=8)), 2) == EXPECTED


async def test_what_the_source_has_of_a_chain_is_pulled_and_the_rest_is_said(transport: str) -> None:
    async with two_peers(16, 64, **both(transport)) as (source, target):
        await source.compute(PROMPT[:50])
        [report] = await target.pull(target.pull_from(source))
        assert summary(report) == (True, 3, "the source has 3 of 8 units", transport)
        assert target.resident() == set(HASHES[:3])
        assert await target.continue_from(48) == EXPECTED


async def test_the_middle_of_a_chain_can_be_pulled(transport: str) -> None:
    async with two_peers(64, 16, **both(transport)) as (source, target):
        await source.compute()
        await target.compute(PROMPT[:48])
        [report] = await target.pull(target.pull_from(source, HASHES[3:8], first_page=3))
        assert report.num_units == 5
        assert await target.continue_from(128) == EXPECTED


async def test_two_pulls_of_one_plan_and_the_steps_beside_them(transport: str) -> None:
    other = list(range(200, 280))
    async with two_peers(**both(transport)) as (source, target):
        await source.compute()
        await source.compute(other, seq=2, first_page=20)
        pulls = [
            target.pull_from(source, first_page=0),
            target.pull_from(source, chain(ROOT, other), first_page=20),
        ]
        beside = chunk(5, 0, 40, tokens=PROMPT[:40], pages=grant([50, 51, 52, 53], 64))
        reports = await target.client.run(plan(1, pulls=pulls, chunks=[beside], max_steps=8))
        assert tokens_of(reports, 5) == reference_output(PROMPT[:40], 8)
        done = [await target.client.pulled() for _ in pulls]
        assert sorted(summary(report)[1] for report in done) == [5, 8]
        assert await target.continue_from(128) == EXPECTED


async def test_a_source_that_has_nothing_gives_nothing(transport: str) -> None:
    async with two_peers(**both(transport)) as (source, target):
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, report.failure) == (0, "the source has 0 of 8 units")
        assert target.resident() == set()


async def test_a_nixl_pull_leaves_no_transfer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nixl.install(monkeypatch)
    async with two_peers(**both(NIXL)) as (source, target):
        await source.compute()
        await target.pull(target.pull_from(source))
        agents = list(fake_nixl.FakeAgent.agents.values())
        assert len(agents) == 2
        assert [(agent.live_transfers, agent.remotes) for agent in agents] == [(0, set()), (0, set())]
    assert [agent.registered for agent in agents] == [[], []]


def test_the_best_transport_both_have_is_chosen() -> None:
    assert choose_transport([SHM, NIXL, GRPC], [SHM, GRPC], same_host=True) == SHM
    assert choose_transport([SHM, NIXL, GRPC], [SHM, NIXL, GRPC], same_host=False) == NIXL
    assert choose_transport([SHM, GRPC], [SHM, GRPC], same_host=False) == GRPC
    assert choose_transport([GRPC], [SHM, GRPC], same_host=True) == GRPC
    assert choose_transport(["pigeon"], [SHM, GRPC], same_host=True) == GRPC
