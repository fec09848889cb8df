"""Redis, the scheduler and the workers come and go: 503 meanwhile, service afterwards, never a hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway import mesh, replies
from gateway.redis_link import open_redis
from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import Stack, StackOpener, open_stack
from tests.gateway.scripted_scheduler import begins, saying, silent
from tests.redis_fixture import RedisServer
from wire import keys
from wire.ids import GatewayId
from wire.redis_pipe import Command, RedisPipe


async def eventually(check: Callable[[], Awaitable[bool]], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await check():  # noqa: ASYNC110  # what is waited for happens in another process
            await asyncio.sleep(0.02)


async def until_health(stack: Stack, status: int) -> str:
    """Wait for that readiness; the reason given."""
    reason = ""

    async def check() -> bool:
        nonlocal reason
        got, body = await stack.health()
        reason = body.get("reason", "")
        return got == status

    await eventually(check)
    return reason


async def refused(stack: Stack) -> str:
    """The message of the 503 that a new request gets, and that it comes at once."""
    async with asyncio.timeout(1.0):
        status, body = await stack.complete()
    assert (status, body["error"]["code"]) == (503, "unavailable")
    return str(body["error"]["message"])


async def test_a_connection_that_broke_unseen_costs_no_request(new_stack: StackOpener) -> None:
    async with new_stack(saying([2])) as stack:
        assert (await stack.complete())[0] == 200
        for _ in range(3):
            redis: Any = stack.scheduler.redis  # this command has no types
            await redis.client_kill_filter(_type="normal", skipme=True)
            assert (await stack.complete())[0] == 200


async def test_a_request_whose_answer_was_lost_is_not_counted_twice(
    new_stack: StackOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It filled the cell itself: sent again, it must not be refused, and then run for nobody."""
    async with new_stack(saying([2]), max_live_requests=2) as stack:
        assert (await stack.complete())[0] == 200
        execute = RedisPipe.execute
        lost: list[list[Any]] = []

        async def loses_one(self: RedisPipe, commands: Sequence[Command]) -> list[Any]:
            answers = await execute(self, commands)
            if not lost and commands[0][0] == "EVAL" and stack.parts.gateway_id in commands[0]:
                lost.append(answers)
                raise RedisConnectionError("the answer was lost")
            return answers

        monkeypatch.setattr(RedisPipe, "execute", loses_one)
        assert (await stack.complete(["one", "two"]))[0] == 200
        assert lost == [[1]]
        assert await stack.scheduler.live() == 0


async def test_without_a_worker_new_requests_get_503(new_stack: StackOpener) -> None:
    async with new_stack(saying([2]), card={"num_workers": 0}) as stack:
        assert await until_health(stack, 503) == "no worker is up"
        assert await refused(stack) == "no worker is up"
        stack.scheduler.card = replace(stack.scheduler.card, num_workers=1)
        await until_health(stack, 200)
        assert (await stack.complete())[0] == 200


async def test_a_cell_with_another_model_is_not_ours(new_stack: StackOpener) -> None:
    async with new_stack(card={"model_name": "llama"}) as stack:
        assert "'llama'" in await until_health(stack, 503)
        await refused(stack)


async def test_without_a_scheduler_running_requests_end_after_the_grace(new_stack: StackOpener) -> None:
    async with new_stack(mesh_grace_s=0.5) as stack:
        whole = asyncio.create_task(stack.complete())
        await stack.scheduler.arrived.get()
        stack.scheduler.script = begins(stack.encode("Hi"))
        body = {"model": "smollm2", "prompt": "x", "stream": True}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body) as response:
            await stack.scheduler.withdraw_card()
            assert await until_health(stack, 503) == "no scheduler is active"
            assert await refused(stack) == "no scheduler is active"
            assert (await whole)[0] == 503
            assert '"code":"unavailable"' in (await response.text()).split("\n\n")[-2]


async def test_a_scheduler_that_is_back_within_the_grace_goes_on(new_stack: StackOpener) -> None:
    async with new_stack() as stack:
        answer = asyncio.create_task(stack.complete())
        entry = await stack.scheduler.arrived.get()
        await stack.scheduler.withdraw_card()
        await until_health(stack, 503)
        await stack.scheduler.publish_card()
        await until_health(stack, 200)
        await stack.scheduler.say(entry, [2])
        await stack.scheduler.end(entry, 1)
        assert (await answer)[0] == 200


async def test_a_request_that_the_mesh_forgot_ends(new_stack: StackOpener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "AUDIT_S", 0.3)
    async with new_stack() as stack:
        answer = asyncio.create_task(stack.complete())
        await stack.scheduler.arrived.get()
        await stack.scheduler.redis.delete(keys.live(stack.scheduler.cell))
        status, body = await answer
        assert (status, body["error"]["message"]) == (503, "the mesh lost this request")


async def test_a_terminal_that_only_the_journal_has_is_found(
    new_stack: StackOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "AUDIT_S", 0.3)
    async with new_stack() as stack:
        answer = asyncio.create_task(stack.complete())
        entry = await stack.scheduler.arrived.get()
        lost = replace(entry, gateway_id=GatewayId("somebody-else"))
        await stack.scheduler.write_journal(entry, 0, 0, [*stack.encode("Hi"), 2])
        await stack.scheduler.redis.hset(keys.journal(stack.scheduler.cell, entry.request_id), "f:0", "2:stop")
        await stack.scheduler.terminate(lost)
        status, body = await answer
        assert (status, body["choices"][0]["text"]) == (200, "Hi")


async def test_a_gateway_that_starts_without_redis_serves_when_it_is_there(
    durable_redis_server: RedisServer, smollm2_dir: Path, tokenizer: Tokenizer
) -> None:
    async with open_stack(durable_redis_server.url, smollm2_dir, tokenizer, saying([2]), {}) as stack:
        durable_redis_server.kill()
        assert await until_health(stack, 503) == "Redis is away"
        assert await refused(stack) == "Redis is away"
        durable_redis_server.start()
        await until_health(stack, 200)
        assert (await stack.complete())[0] == 200


async def test_a_stream_goes_on_over_a_restart_of_redis(
    durable_redis_server: RedisServer, smollm2_dir: Path, tokenizer: Tokenizer
) -> None:
    async with open_stack(durable_redis_server.url, smollm2_dir, tokenizer, silent, {}) as stack:
        output = stack.encode("One two three four")
        answer = asyncio.create_task(stack.complete())
        entry = await stack.scheduler.arrived.get()
        await stack.scheduler.say(entry, output[:2])
        durable_redis_server.kill()
        await until_health(stack, 503)
        durable_redis_server.start()
        await until_health(stack, 200)
        await stack.scheduler.say(entry, output)  # a scheduler publishes its last seconds again
        await stack.scheduler.end(entry, len(output))
        status, body = await answer
        assert (status, body["choices"][0]["text"]) == (200, "One two three four")


async def test_a_request_that_redis_lost_is_added_again(
    tmp_path: Path, smollm2_dir: Path, tokenizer: Tokenizer
) -> None:
    """A Redis without persistence comes back empty, and its fencing numbers and stream ids begin anew."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        async with open_stack(server.url, smollm2_dir, tokenizer, silent, {"fence": 9}) as stack:
            answer = asyncio.create_task(stack.complete())
            lost = await stack.scheduler.arrived.get()
            server.kill()
            await until_health(stack, 503)
            server.start()
            stack.scheduler.card = replace(stack.scheduler.card, fence=1)
            redis, lane = stack.scheduler.redis, keys.requests(stack.scheduler.cell, "interactive")

            async def added_again() -> bool:
                return bool(await redis.xlen(lane))

            await eventually(added_again)
            assert await stack.scheduler.live() == 1
            await stack.scheduler.say(lost, [*stack.encode("Hi"), 2])
            await stack.scheduler.end(lost, 2)
            status, body = await answer
            assert (status, body["choices"][0]["text"]) == (200, "Hi")
    finally:
        server.kill()


async def test_without_redis_running_requests_end_after_the_grace(
    durable_redis_server: RedisServer, smollm2_dir: Path, tokenizer: Tokenizer
) -> None:
    async with open_stack(durable_redis_server.url, smollm2_dir, tokenizer, silent, {}, mesh_grace_s=0.5) as stack:
        answer = asyncio.create_task(stack.complete())
        entry = await stack.scheduler.arrived.get()
        durable_redis_server.kill()
        async with asyncio.timeout(5):
            status, body = await answer
        assert (status, body["error"]["message"]) == (503, "Redis is away")
        durable_redis_server.start()
        async with asyncio.timeout(5):  # its cancel waited for Redis
            assert (await stack.scheduler.cancelled.get()).request_id == entry.request_id


async def test_a_live_set_of_the_wrong_type_is_not_called_an_outage(
    new_stack: StackOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_stack(saying([2])) as stack:
        live = keys.live(stack.scheduler.cell)
        await stack.scheduler.redis.set(live, "x")
        assert await refused(stack) == "Redis refused the request"
        assert "WRONGTYPE" in caplog.text
        assert (await stack.health())[0] == 200
        await stack.scheduler.redis.delete(live)
        assert (await stack.complete())[0] == 200


async def test_a_lease_set_of_the_wrong_type_is_not_called_an_outage(
    new_stack: StackOpener, caplog: pytest.LogCaptureFixture
) -> None:
    async with new_stack(saying([2])) as stack:
        gateways = keys.gateways(stack.scheduler.cell)
        await stack.scheduler.redis.set(gateways, "x")
        assert await until_health(stack, 503) == "Redis refuses this gateway's commands"
        assert "WRONGTYPE" in caplog.text
        await stack.scheduler.redis.delete(gateways)
        await until_health(stack, 200)


async def test_a_reply_stream_of_the_wrong_type_is_not_called_an_outage(
    new_stack: StackOpener, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_redis(redis_url) as redis:
        stream = keys.replies("wrong-type", GatewayId("g"))
        await redis.set(stream, "x")
        async with new_stack(saying([2]), cell_name="wrong-type", gateway_id="g") as stack:
            assert await until_health(stack, 503) == "the reply stream cannot be read yet"

            async def says_why() -> bool:
                return "WRONGTYPE" in caplog.text

            await eventually(says_why)  # before Redis's first answer it cannot be read either
            await redis.delete(stream)
            await until_health(stack, 200)
            assert (await stack.complete())[0] == 200


async def test_a_redis_that_hangs_makes_nobody_wait_long(
    durable_redis_server: RedisServer, smollm2_dir: Path, tokenizer: Tokenizer
) -> None:
    async with (
        open_stack(durable_redis_server.url, smollm2_dir, tokenizer, silent, {}) as stack,
        open_redis(durable_redis_server.url) as redis,
    ):
        await redis.client_pause(4000)
        async with asyncio.timeout(4):
            answers = await asyncio.gather(*(stack.complete() for _ in range(mesh.SUBMIT_BATCH + 20)))
        assert {status for status, _ in answers} == {503}
        assert {body["error"]["message"] for _, body in answers} == {"Redis is away"}
        await until_health(stack, 200)
