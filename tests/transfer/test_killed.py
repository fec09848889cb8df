"""Sources in processes of their own, killed with SIGKILL at every layer boundary of a pull."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gpu_worker.transfer.transports import GRPC, SHM
from tests.transfer.peers import EXPECTED, HASHES, peer, pull_from_address
from tests.worker.fake_runner import NUM_LAYERS

START_TIMEOUT_S = 60.0


@asynccontextmanager
async def source_process(dies_after: int | None = None) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its worker's address."""
    arguments = [] if dies_after is None else [str(dies_after)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transfer.source_process",
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        yield process, json.loads(line)["address"]
    finally:
        if process.returncode is None:
            process.kill()
        process.stdin.close()
        await process.wait()


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
async def test_by_grpc_a_source_that_is_killed_fails_the_pull(layer: int) -> None:
    async with source_process(dies_after=layer) as (process, address), peer() as target:
        [report] = await target.pull(pull_from_address(address, pages=range(8), lease_ms=10_000))
        assert await process.wait() == -signal.SIGKILL
        assert (report.num_units, report.transport) == (0, GRPC)
        assert report.failure is not None and "UNAVAILABLE" in report.failure
        assert target.resident() == set()
        await target.compute()
        assert await target.continue_from(128) == EXPECTED


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
async def test_by_shared_memory_a_source_that_is_killed_still_gives_what_it_offered(layer: int) -> None:
    """Its memory lives as long as it is mapped, and nobody can change it any more."""
    loop = asyncio.get_running_loop()

    def kill(copied: int) -> None:
        if copied == layer:
            process.kill()
            asyncio.run_coroutine_threadsafe(process.wait(), loop).result(START_TIMEOUT_S)

    async with source_process() as (process, address), peer(after_copy=kill) as target:
        [report] = await target.pull(pull_from_address(address, pages=range(8), lease_ms=10_000))
        assert await process.wait() == -signal.SIGKILL
        assert (report.num_units, report.failure, report.transport) == (8, None, SHM)
        assert target.resident() == set(HASHES)
        assert await target.continue_from(128) == EXPECTED


async def test_the_memory_of_a_source_that_died_is_let_go() -> None:
    async with source_process() as (process, address), peer() as target:
        [report] = await target.pull(pull_from_address(address, pages=range(8), lease_ms=10_000))
        assert report.transport == SHM
        assert mapped_pools() == 1
        process.kill()
        await process.wait()
        # The next pull, whatever becomes of it, has the watch look around.
        await target.pull(pull_from_address(address, pages=range(8), lease_ms=200, pull_id=2))
        async with asyncio.timeout(10):
            while mapped_pools():  # noqa: ASYNC110  # a mapping has no event
                await asyncio.sleep(0.02)


def mapped_pools() -> int:
    """Pools of others that this process maps: its own, one for each runner, are writable."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:phasemesh-kv" in line and " r--s " in line for line in maps)
