"""`python -m gateway`, started and stopped as in service."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from gateway.redis_link import open_redis
from tests.gateway.conftest import StackOpener
from tests.gateway.scripted_scheduler import ScriptedScheduler, begins, saying, silent
from tests.redis_fixture import free_port


@asynccontextmanager
async def gateway_process(port: int, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {**os.environ, **{f"PHASEMESH_{name}": value for name, value in variables.items()}}
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway"), env={**environ, "PHASEMESH_PORT": str(port)}, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.communicate()


async def until_ready(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(15):
        while True:
            with suppress(aiohttp.ClientConnectionError):
                async with http.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)


async def test_sigterm_finishes_what_runs_and_refuses_what_comes(redis_url: str, smollm2_dir: Path) -> None:
    cell, port = "drain-finishes", free_port()
    url = f"http://127.0.0.1:{port}"
    body = {"model": "smollm2", "prompt": "Hi"}
    variables = {"CELL": cell, "REDIS_URL": redis_url, "MODEL": str(smollm2_dir), "MODEL_NAME": "smollm2"}
    async with (
        open_redis(redis_url) as redis,
        ScriptedScheduler(redis, cell, begins([5])) as scheduler,
        gateway_process(port, **variables) as child,
        aiohttp.ClientSession() as http,
    ):
        await until_ready(http, url)
        async with http.post(f"{url}/v1/completions", json={**body, "stream": True}) as running:
            entry = await scheduler.arrived.get()
            await running.content.readuntil(b"\n\n")
            child.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5):
                while True:
                    async with http.get(f"{url}/health") as health:
                        if "stopping" in await health.text():
                            assert health.status == 503
                            break
            async with http.post(f"{url}/v1/completions", json=body) as refused:
                assert (refused.status, (await refused.json())["error"]["code"]) == (503, "unavailable")
            await scheduler.say(entry, [2], position=1)
            await scheduler.end(entry, 2)
            assert (await running.text()).endswith("data: [DONE]\n\n")
        async with asyncio.timeout(5):
            assert await child.wait() == 0
        assert await redis.zcard(f"{{{cell}}}:gateways") == 0


async def test_what_does_not_finish_in_time_ends_in_503_and_is_cancelled(redis_url: str, smollm2_dir: Path) -> None:
    cell, port = "drain-cuts", free_port()
    url = f"http://127.0.0.1:{port}"
    variables = {"CELL": cell, "REDIS_URL": redis_url, "MODEL": str(smollm2_dir), "MODEL_NAME": "smollm2"}
    async with (
        open_redis(redis_url) as redis,
        ScriptedScheduler(redis, cell, silent) as scheduler,
        gateway_process(port, DRAIN_S="0.3", **variables) as child,
        aiohttp.ClientSession() as http,
    ):
        await until_ready(http, url)

        async def post() -> tuple[int, str]:
            async with http.post(f"{url}/v1/completions", json={"model": "smollm2", "prompt": "Hi"}) as response:
                return response.status, (await response.json())["error"]["message"]

        running = asyncio.create_task(post())
        entry = await scheduler.arrived.get()
        child.send_signal(signal.SIGTERM)
        assert await running == (503, "this gateway is stopping")
        async with asyncio.timeout(5):
            assert await child.wait() == 0
            assert (await scheduler.cancelled.get()).request_id == entry.request_id


async def test_a_taken_port_is_named(redis_url: str, smollm2_dir: Path, new_stack: StackOpener) -> None:
    async with new_stack(saying([2])) as stack:
        port = int(stack.url.rpartition(":")[2])
        async with gateway_process(port, MODEL=str(smollm2_dir), REDIS_URL=redis_url) as child:
            _, stderr = await child.communicate()
    assert child.returncode == 1
    assert f"127.0.0.1:{port}" in stderr.decode()


async def test_a_malformed_variable_is_named(smollm2_dir: Path) -> None:
    for variables, name in (
        ({"DRAIN_S": "soon"}, "PHASEMESH_DRAIN_S"),
        ({"NO_SUCH": "1"}, "PHASEMESH_NO_SUCH"),
        ({"REDIS_URL": "http://x", "MODEL": str(smollm2_dir)}, "PHASEMESH_REDIS_URL"),
    ):
        async with gateway_process(0, **variables) as child:
            _, stderr = await child.communicate()
        assert child.returncode == 2
        assert name in stderr.decode()
