"""The whole scheduler between a real Redis and gRPC workers that check every KV slot: alone, taken over, cut off."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Protocol

import pytest
from redis.asyncio import Redis

from observability.metrics import SchedulerMetrics
from observability.tracing import NullTracer
from scheduler.__main__ import Scheduler
from tests.engine.paged_worker import CARD
from tests.redis_fixture import RedisServer, free_port
from tests.scheduler_service.client import Gateway, gateway
from tests.scheduler_service.parts import CELL, is_closed, request_entry, submit, until
from tests.scheduler_service.scripted_worker import ScriptedWorker, register, serve
from wire import keys
from wire.config import SchedulerConfig, load
from wire.entries import CellCard
from wire.ids import GatewayId
from wire.plan import Role
from wire.redis_client import open_redis

STEP_S = 0.005


class HasUrl(Protocol):
    url: str


def environment(redis_server: HasUrl, **settings: str) -> dict[str, str]:
    named = {f"PHASEMESH_{name}": value for name, value in settings.items()}
    return {
        "PHASEMESH_CELL": CELL,
        "PHASEMESH_REDIS_URL": redis_server.url,
        "PHASEMESH_NO_WORKER_GRACE_S": "1",
        **named,
    }


@asynccontextmanager
async def scheduler(redis_server: HasUrl, **settings: str) -> AsyncIterator[Scheduler]:
    """In this process."""
    config = load(SchedulerConfig, environment(redis_server, **settings))
    built = Scheduler(config, SchedulerMetrics(), NullTracer())
    task = asyncio.create_task(built.run())
    try:
        yield built
    finally:
        built.stop()
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done, "the scheduler does not stop"
        assert task.cancelled() or task.exception() is None, task.exception()


@asynccontextmanager
async def scheduler_process(redis_server: RedisServer, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler", env={**os.environ, **environment(redis_server, **settings)}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Gateway]:
    async with gateway(redis_server.url) as built:
        yield built


@pytest.fixture
async def worker(redis: Redis) -> AsyncIterator[ScriptedWorker]:
    built = ScriptedWorker(step_s=STEP_S)
    async with serve(built):
        await register(redis, CELL, built)
        yield built


async def all_quiet(redis: Redis, *request_ids: str) -> None:
    """Every request is closed, in Redis too."""
    for request_id in request_ids:
        await until(lambda request_id=request_id: is_closed(redis, request_id))  # type: ignore[misc]


async def test_requests_stream_and_end_and_leave_nothing(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    async with scheduler(redis_server) as running:
        await until(lambda: has_workers(redis, 1))
        assert running.not_ready is None
        names = [f"r{i}" for i in range(8)]
        lanes = ("interactive", "batch")
        streams = [
            await client.submit(
                request_entry(name, list(range(2, 12 + 5 * i)), max_tokens=30, num_choices=1 + i % 2), lanes[i % 2]
            )
            for i, name in enumerate(names)
        ]
        for stream in streams:
            await stream.finished_right()
        await all_quiet(redis, *names)
        card = CellCard.decode(await redis.hgetall(keys.cell_card(CELL)))  # type: ignore[arg-type]
    assert card.num_workers == 1 and card.model_name == "model"
    assert await redis.get(keys.lease(CELL)) is None, "released at the end"


async def test_roles_change_under_running_requests_and_drop_none(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    other = ScriptedWorker("w2", step_s=STEP_S)
    async with serve(other), scheduler(redis_server):
        await register(redis, CELL, other)
        await until(lambda: has_workers(redis, 2))
        streams = []
        for name, role in (("r0", Role.PREFILL), ("r1", Role.DECODE), ("r2", Role.BOTH)):
            streams += [
                await client.submit(request_entry(f"{name}-{i}", list(range(2, 20 + i)), max_tokens=60))
                for i in range(4)
            ]
            await redis.hset(keys.roles(CELL), "w2", role)
            await until(lambda role=role: in_role(redis, "w2", role))  # type: ignore[misc]
        for stream in streams:
            await stream.finished_right()


async def in_role(redis: Redis, worker_id: str, role: Role) -> bool:
    """The card says so."""
    raw = await redis.hgetall(keys.cell_card(CELL))
    return (worker_id, role) in [(w.worker_id, w.role) for w in CellCard.decode(raw).workers]  # type: ignore[arg-type]


async def has_workers(redis: Redis, num_workers: int) -> bool:
    card = await redis.hgetall(keys.cell_card(CELL))
    return bool(card) and CellCard.decode(card).num_workers == num_workers  # type: ignore[arg-type]


async def test_the_sole_worker_may_come_back_with_another_model(
    redis_server: RedisServer, redis: Redis, client: Gateway
) -> None:
    port = free_port()
    async with scheduler(redis_server):
        async with serve(ScriptedWorker(step_s=STEP_S, epoch=1), port):
            await register(redis, CELL, ScriptedWorkerAt(port, 1))
            await (await client.submit(request_entry("before"))).finished_right()
        await until(lambda: has_workers(redis, 0))
        async with serve(ScriptedWorker(step_s=STEP_S, epoch=2, card=replace(CARD, name="next")), port):
            await register(redis, CELL, ScriptedWorkerAt(port, 2))
            await until(lambda: has_workers(redis, 1))
            await (await client.submit(request_entry("after"))).finished_right()
            card = CellCard.decode(await redis.hgetall(keys.cell_card(CELL)))  # type: ignore[arg-type]
    assert card.model_name == "next"


async def test_junk_in_the_fence_changes_no_token(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.01
    async with scheduler(redis_server):
        stream = await client.submit(request_entry("r", max_tokens=300))
        await stream.until(20)
        await redis.set(keys.fence(CELL), "junk")
        await stream.finished_right()
        await all_quiet(redis, "r")
    assert len(worker.fences) == 2 and worker.fences[1] > worker.fences[0]


async def test_one_bad_reply_stream_stops_no_other(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    evil = GatewayId("evil")
    await redis.set(keys.replies(CELL, evil), "x")
    async with scheduler(redis_server):
        await submit(redis, request_entry("evil", gateway_id=evil))
        await (await client.submit(request_entry("r"))).finished_right()
        await all_quiet(redis, "evil", "r")
    async with scheduler(redis_server):  # and recovery is not stopped either
        await submit(redis, request_entry("evil2", gateway_id=evil))
        await (await client.submit(request_entry("r2"))).finished_right()
        await all_quiet(redis, "evil2", "r2")


async def test_a_cancel_ends_a_request_within_a_quarter_of_a_second(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    async with scheduler(redis_server):
        stream = await client.submit(request_entry("r", max_tokens=350))
        await stream.until(5)
        await client.cancel("r")
        await stream.finished(0.25)
        assert stream.finish_reasons == {0: "cancelled"} and len(stream.outputs[0]) < 350
        await all_quiet(redis, "r")


async def test_a_worker_killed_mid_stream_changes_no_token(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    second = ScriptedWorker("w2", step_s=STEP_S)
    async with scheduler(redis_server):
        streams = [await client.submit(request_entry(f"r{i}", [3, 4, 5 + i], max_tokens=80)) for i in range(4)]
        await streams[0].until(10)
        async with serve(second) as server:
            await register(redis, CELL, second)
            late = [await client.submit(request_entry(f"s{i}", [9, 4, 5 + i], max_tokens=80)) for i in range(4)]
            await late[-1].until(10)
            await server.stop(None)
            for stream in streams + late:
                await stream.finished_right()


async def test_the_only_worker_lost_is_waited_for_and_then_an_error(
    redis_server: RedisServer, redis: Redis, client: Gateway
) -> None:
    port = free_port()
    async with scheduler(redis_server):
        async with serve(ScriptedWorker(step_s=STEP_S, epoch=1), port) as server:
            await register(redis, CELL, ScriptedWorkerAt(port, 1))
            stream = await client.submit(request_entry("r", max_tokens=300))
            await stream.until(5)
            await server.stop(None)
        assert (await stream.finished(3)).error_code == "worker_lost"
        async with serve(ScriptedWorker(step_s=STEP_S, epoch=2), port):
            await register(redis, CELL, ScriptedWorkerAt(port, 2))
            again = await client.submit(request_entry("again"))
            await again.finished_right()


def ScriptedWorkerAt(port: int, epoch: int) -> ScriptedWorker:
    """Only to be registered: where another one listens."""
    worker = ScriptedWorker(epoch=epoch)
    worker.address = f"127.0.0.1:{port}"
    return worker


async def test_a_scheduler_killed_mid_stream_is_continued_by_its_standby(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.01
    async with scheduler_process(redis_server) as active:
        streams = [
            await client.submit(request_entry(f"r{i}", [3, 4, 5 + i], max_tokens=350, num_choices=1 + i))
            for i in range(3)
        ]
        await streams[0].until(40)
        async with scheduler(redis_server) as standby:
            assert standby.not_ready is not None
            active.kill()
            for stream in streams:
                await stream.finished_right(15)
            assert standby.not_ready is None
            await all_quiet(redis, "r0", "r1", "r2")
    assert len(worker.fences) == 2 and worker.fences[1] > worker.fences[0]


async def test_sigterm_hands_over_at_once_and_exits_0(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.01
    async with scheduler_process(redis_server) as active:
        stream = await client.submit(request_entry("r", max_tokens=350))
        await stream.until(20)
        async with scheduler(redis_server) as standby:
            active.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(active.wait(), 5) == 0

            async def is_active() -> bool:
                return standby.not_ready is None

            await until(is_active, timeout_s=1)
            await stream.finished_right()


async def test_a_frozen_scheduler_that_wakes_up_is_fenced_out(
    redis_server: RedisServer, redis: Redis, client: Gateway, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.01
    port = free_port()
    async with scheduler_process(redis_server, SCHEDULER_PORT=str(port)) as first:
        stream = await client.submit(request_entry("r", max_tokens=380))
        await stream.until(20)
        async with scheduler(redis_server) as second:
            os.kill(first.pid, signal.SIGSTOP)

            async def is_active() -> bool:
                return second.not_ready is None

            await until(is_active, timeout_s=5)
            os.kill(first.pid, signal.SIGCONT)
            await stream.finished_right(15)
            assert second.not_ready is None
            assert await asyncio.to_thread(health, port, "live") == 200
            assert await asyncio.to_thread(health, port, "health") == 503
            await all_quiet(redis, "r")


def health(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return int(error.code)


@pytest.mark.parametrize(
    ("server", "outage_s"), [("redis_server", 0.0), ("redis_server", 3.5), ("durable_redis_server", 3.5)]
)
async def test_streams_live_through_a_kill_of_redis(
    server: str, outage_s: float, request: pytest.FixtureRequest
) -> None:
    """Whether it lost its data or not, and although the lease lapsed meanwhile."""
    redis_server: RedisServer = request.getfixturevalue(server)
    worker = ScriptedWorker(step_s=0.01)
    async with (
        serve(worker),
        open_redis(redis_server.url) as redis,
        gateway(redis_server.url) as client,
        scheduler(redis_server),
    ):
        await register(redis, CELL, worker, lease_s=300)
        stream = await client.submit(request_entry("r", max_tokens=150))
        await stream.until(20)
        redis_server.kill()
        await asyncio.sleep(outage_s)
        redis_server.start()
        await stream.finished_right(15)
        after = await client.submit(request_entry("after"))
        await after.finished_right()
        await all_quiet(redis, "r", "after")
    assert len(worker.fences) == 1, "the same tenure, the same sessions"


async def test_a_request_that_redis_lost_outlives_the_scheduler_too(
    redis_server: RedisServer, client: Gateway, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.02
    async with scheduler_process(redis_server) as first, open_redis(redis_server.url) as redis:
        stream = await client.submit(request_entry("r", max_tokens=300))
        await stream.until(20)
        redis_server.kill()
        redis_server.start()
        await register(redis, CELL, worker)

        async def is_restored() -> bool:
            return await redis.xlen(keys.requests(CELL, "interactive")) == 1

        await until(is_restored)
        first.kill()
        async with scheduler(redis_server):
            await stream.finished_right(20)
            await all_quiet(redis, "r")


async def test_without_any_worker_a_request_ends_in_an_error(
    redis_server: RedisServer, redis: Redis, client: Gateway
) -> None:
    async with scheduler(redis_server, NO_WORKER_GRACE_S="0.3"):
        stream = await client.submit(request_entry("r"))
        assert (await stream.finished(3)).error_code == "unavailable"
        await all_quiet(redis, "r")


async def test_a_malformed_variable_is_named_at_start(redis_server: RedisServer) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "scheduler",
        env={**os.environ, **environment(redis_server, SCHEDULER_PORT="many")},
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2 and b"PHASEMESH_SCHEDULER_PORT" in stderr
