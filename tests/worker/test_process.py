"""`python -m gpu_worker` as a process: real model, real Redis, a scheduler's stream, a clean stop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
import grpc
import pytest
from redis.asyncio import Redis

from tests.redis_fixture import free_port
from tests.worker.plans import chunk, grant, greedy, plan
from tests.worker.test_executor import tokens_of
from tests.worker.test_session import Stream
from wire import keys
from wire.entries import WorkerEntry
from wire.ids import WorkerId
from wire.plan import Role

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
CELL = "worker-process"


@asynccontextmanager
async def worker_process(**variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    base = {name: value for name, value in os.environ.items() if not name.startswith(("PHASEMESH_", "OTEL_"))}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gpu_worker",
        env=base | {f"PHASEMESH_{name}": value for name, value in variables.items()},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while not await condition():  # noqa: ASYNC110  # another process has no event for us
            await asyncio.sleep(0.05)


async def test_a_worker_serves_the_real_model_and_stops_cleanly(smollm2_dir: Path, redis_url: str) -> None:
    health = f"http://127.0.0.1:{free_port()}"
    async with (
        worker_process(
            MODEL=str(smollm2_dir),
            REDIS_URL=redis_url,
            CELL=CELL,
            WORKER_ID="w1",
            WORKER_ROLE="decode",
            WORKER_MIN_PROMPT_TOKENS="2000",
            WORKER_HEALTH_PORT=health.rpartition(":")[2],
            KV_PAGES="32",
            KV_PAGE_SIZE="16",
            WORKER_THREADS="1",
        ) as process,
        aiohttp.ClientSession() as http,
        Redis.from_url(redis_url) as redis,
    ):

        async def status() -> int:
            try:
                async with http.get(f"{health}/health") as response:
                    return response.status
            except aiohttp.ClientError:
                return 0

        async def ready() -> bool:
            assert process.returncode is None
            return await status() == 200

        async def registered() -> bool:
            return await redis.zscore(keys.workers(CELL), "w1") is not None

        await until(ready)
        await until(registered)
        raw = cast(dict[bytes, bytes], await redis.hgetall(keys.worker(CELL, WorkerId("w1"))))
        entry = WorkerEntry.decode(raw)
        assert (entry.pid, entry.role) == (process.pid, Role.DECODE)
        async with grpc.aio.insecure_channel(entry.address) as channel:
            stream = Stream(channel)
            hello, residents = await stream.attach(fence=1)
            assert (hello.epoch, hello.num_pages, residents) == (entry.epoch, 32, [])
            assert (hello.role, hello.min_prompt_tokens, hello.max_prompt_tokens) == (Role.DECODE, 2000, 0)
            prompt = list(range(100, 120))
            first = chunk(1, 0, 20, tokens=prompt, pages=grant([1, 2], 32), sampling=greedy(8, ignore_eos=True))
            tokens = tokens_of(await stream.run(plan(1, chunks=[first], max_steps=8)), 1)
            assert len(tokens) == 8
            # The same tokens in chunks, batched with itself, in other pages.
            again = [
                chunk(seq, 0, 7, tokens=prompt, pages=grant(pages, 32), sampling=greedy(8, ignore_eos=True))
                for seq, pages in ((2, [5, 3]), (3, [9, 4]))
            ]
            reports = await stream.run(plan(2, chunks=again))
            reports += await stream.run(plan(3, chunks=[chunk(2, 7, 13), chunk(3, 7, 13)], max_steps=8))
            assert tokens_of(reports, 2) == tokens_of(reports, 3) == tokens
            process.send_signal(signal.SIGTERM)
            assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S) == 0
        assert not await registered()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORKER_PORT": "high"}, "PHASEMESH_WORKER_PORT"),
        ({"WORKER_POTR": "1"}, "unknown variable PHASEMESH_WORKER_POTR"),
        ({"MODEL": "/nowhere"}, "PHASEMESH_MODEL"),
        ({"REDIS_URL": "http://nowhere"}, "PHASEMESH_REDIS_URL"),
        ({"SIMULATE": "maybe"}, "PHASEMESH_SIMULATE"),
        ({"SIMULATED_FIXED_US": "-1"}, "PHASEMESH_SIMULATED_FIXED_US"),
        ({"SIMULATED_DECODE_TOKEN_US": "nan"}, "PHASEMESH_SIMULATED_DECODE_TOKEN_US"),
        ({"SIMULATED_WEIGHTS_US": "inf"}, "PHASEMESH_SIMULATED_WEIGHTS_US"),
    ],
)
async def test_a_worker_that_cannot_start_says_why_in_a_line(variables: dict[str, str], message: str) -> None:
    async with worker_process(**variables) as process:
        _, stderr = await asyncio.wait_for(process.communicate(), START_TIMEOUT_S)
        assert process.returncode in (1, 2)
        assert message in stderr.decode().splitlines()[-1]
        assert "Traceback" not in stderr.decode()
