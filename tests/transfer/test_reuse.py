"""A source that gives its pages to somebody else while they are pulled: the pull fails, and delivers nothing stale."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.transports import GRPC, NIXL, SHM
from tests.transfer import fake_nixl
from tests.transfer.peers import EXPECTED, HASHES, PROMPT, Peer, two_peers
from tests.worker.fake_runner import NUM_LAYERS
from tests.worker.plans import chunk, copy, decode, grant, plan
from tests.worker.test_executor import TIMEOUT_S

OTHER = list(range(300, 440))
MOVED = "a page got a new owner while it was read"


class Between:
    """Runs something in the event loop, once, after a layer was read and before it is checked; the reader waits."""

    def __init__(self, layer: int) -> None:
        self._layer = layer
        self._loop = asyncio.get_running_loop()
        self.action: Callable[[], Coroutine[Any, Any, None]] | None = None

    def __call__(self, layer: int) -> None:
        if layer == self._layer and self.action is not None:
            action, self.action = self.action, None
            asyncio.run_coroutine_threadsafe(action(), self._loop).result(TIMEOUT_S)


def options(transport: str, between: Between) -> dict[str, Any]:
    """The hook on that side which reads the source's pages."""
    if transport == GRPC:
        return {"source": {"transports": (GRPC,), "after_read": between}, "transports": (GRPC,)}
    return {"source": {"transports": (transport,)}, "transports": (transport,), "after_copy": between}


@pytest.fixture(params=[SHM, GRPC, NIXL])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == NIXL:
        fake_nixl.install(monkeypatch)
    return name


async def assert_failed_and_recomputes(target: Peer, source: Peer) -> None:
    [report] = await target.pull(target.pull_from(source))
    assert report.num_units == 0
    assert report.failure is not None and report.failure.endswith(MOVED)
    assert target.resident() == set()
    # What lies in the target's pages is of no use to anybody, and does no harm.
    await target.compute()
    assert await target.continue_from(128) == EXPECTED


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("first_page", [0, 7])
async def test_a_page_granted_to_another_sequence_fails_the_pull(transport: str, layer: int, first_page: int) -> None:
    between = Between(layer)
    async with two_peers(**options(transport, between)) as (source, target):
        await source.compute()
        between.action = lambda: source.compute(OTHER[:16], seq=9, first_page=first_page)
        await assert_failed_and_recomputes(target, source)


async def test_a_page_copied_onto_fails_the_pull(transport: str) -> None:
    between = Between(1)
    async with two_peers(**options(transport, between)) as (source, target):
        await source.compute()
        await source.compute(OTHER, seq=3, first_page=20)

        async def copy_over() -> None:
            await source.client.run(plan(50, copies=[copy(20, 4, 16)], max_steps=0))

        between.action = copy_over
        await assert_failed_and_recomputes(target, source)


async def test_a_page_pulled_into_fails_the_pull(transport: str) -> None:
    between = Between(1)
    async with two_peers(**options(transport, between)) as (source, target):
        await source.compute()
        await target.compute(OTHER, seq=3, first_page=20)
        hashes = [h for page in target.worker.executor.residency.pages() for h in page.unit_hashes]

        async def pull_over() -> None:
            [report] = await source.pull(source.pull_from(target, hashes[:1], first_page=2))
            assert report.num_units == 1

        between.action = pull_over
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, (report.failure or "").endswith(MOVED)) == (0, True)
        assert not target.resident() & set(HASHES)


async def test_a_failed_step_of_the_source_fails_the_pull(transport: str) -> None:
    between = Between(1)
    async with two_peers(**options(transport, between)) as (source, target):
        await source.compute()

        def fail(batch: StepBatch) -> None:
            raise RuntimeError("device lost")

        async def break_source() -> None:
            source.worker.runner.before_forward = fail
            await source.client.run(plan(50, chunks=[chunk(9, 0, 4, tokens=[1, 2, 3, 4], pages=grant([40], 16))]))

        between.action = break_source
        [report] = await target.pull(target.pull_from(source))
        assert report.num_units == 0
        assert target.resident() == set()


async def test_a_source_that_goes_on_writing_its_own_pages_fails_nothing(transport: str) -> None:
    between = Between(1)
    async with two_peers(64, 64, **options(transport, between)) as (source, target):
        whole = chunk(1, 0, 140, tokens=PROMPT, pages=grant([0, 1, 2], 192))
        await source.client.run(plan(1, chunks=[whole]))

        async def write_on() -> None:
            reports = await source.client.run(plan(50, decodes=[decode(1)], max_steps=16))
            assert len(reports) == 16  # into the page the last pulled unit's neighbour lies in

        between.action = write_on
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, report.failure) == (8, None)
        assert await target.continue_from(128) == EXPECTED
