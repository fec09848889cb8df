"""Gaps, repeats, fences and errors on the reply stream, seen from the client."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from tests.gateway.conftest import Stack
from tests.gateway.scripted_scheduler import begins
from wire import keys

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_repeated_and_overlapping_replies_are_told_once(stack: Stack) -> None:
    output = stack.encode("One two three four five")
    answer = asyncio.create_task(stack.complete())
    scheduler, entry = stack.scheduler, await stack.scheduler.arrived.get()
    await scheduler.say(entry, output[:2])
    await scheduler.say(entry, output[:3])
    await scheduler.say(entry, output[1:2], position=1)
    await scheduler.say(entry, output, position=0)
    await scheduler.end(entry, len(output))
    await scheduler.terminate(entry)
    status, body = await answer
    assert status == 200
    assert body["choices"][0]["text"] == "One two three four five"
    assert body["usage"]["completion_tokens"] == len(output)


async def test_replies_with_an_older_fence_are_dropped(stack: Stack) -> None:
    good, stale = stack.encode("good words"), stack.encode("stale words")
    answer = asyncio.create_task(stack.complete())
    scheduler, entry = stack.scheduler, await stack.scheduler.arrived.get()
    await scheduler.say(entry, good[:1], fence=7)
    await scheduler.say(entry, stale[1:], position=1, fence=6)
    await scheduler.reply(entry, fence=8)  # a successor's marker
    await scheduler.say(entry, stale[1:], position=1, fence=7)
    await scheduler.say(entry, good[1:], position=1, fence=8)
    scheduler.card = replace(scheduler.card, fence=8)
    await scheduler.end(entry, len(good))
    _, body = await answer
    assert body["choices"][0]["text"] == "good words"


async def test_a_gap_is_filled_from_the_journal(stack: Stack) -> None:
    output = stack.encode("One two three four five")
    answer = asyncio.create_task(stack.complete())
    scheduler, entry = stack.scheduler, await stack.scheduler.arrived.get()
    await scheduler.say(entry, output[:1])
    await scheduler.write_journal(entry, 0, 0, output[:2])
    await scheduler.write_journal(entry, 0, 2, output[2:4])
    await scheduler.say(entry, output[4:], position=4)
    await scheduler.end(entry, len(output))
    _, body = await answer
    assert body["choices"][0]["text"] == "One two three four five"


async def test_a_gap_that_the_scheduler_publishes_later_is_waited_for(stack: Stack) -> None:
    output = stack.encode("One two three")
    answer = asyncio.create_task(stack.complete())
    scheduler, entry = stack.scheduler, await stack.scheduler.arrived.get()
    await scheduler.say(entry, output[1:], position=1)
    await scheduler.end(entry, len(output))
    await scheduler.say(entry, output[:1])
    _, body = await answer
    assert body["choices"][0]["text"] == "One two three"


async def test_an_entry_that_nobody_understands_is_skipped(stack: Stack) -> None:
    answer = asyncio.create_task(stack.complete())
    scheduler, entry = stack.scheduler, await stack.scheduler.arrived.get()
    stream = keys.replies(scheduler.cell, entry.gateway_id)
    await scheduler.redis.xadd(stream, {"v": "99", "body": "{}"})
    await scheduler.redis.xadd(stream, {"v": "1", "body": '{"fence": 8, "items": [["z"]]}'})
    await scheduler.say(entry, [*stack.encode("Hi"), 2])
    await scheduler.end(entry, 2)
    assert (await answer)[1]["choices"][0]["text"] == "Hi"


async def test_an_error_before_the_first_token_has_its_status_even_in_a_stream(stack: Stack) -> None:
    for code, status in (("kv_capacity", 400), ("overloaded", 429), ("worker_lost", 503), ("step_failed", 500)):
        for streamed in (False, True):
            answer = asyncio.create_task(stack.complete(stream=streamed))
            await stack.scheduler.terminate(await stack.scheduler.arrived.get(), code)
            got, body = await answer
            assert (got, body["error"]["code"], body["error"]["message"]) == (status, code, f"scripted {code}")


async def test_retry_after_comes_with_429_and_503(stack: Stack) -> None:
    for code in ("overloaded", "worker_lost"):

        async def post() -> str:
            async with stack.http.post(f"{stack.url}/v1/completions", json={"model": "smollm2", "prompt": "x"}) as got:
                return got.headers["Retry-After"]

        answer = asyncio.create_task(post())
        await stack.scheduler.terminate(await stack.scheduler.arrived.get(), code)
        assert await answer == "7"


async def test_an_error_amid_a_stream_is_its_last_event(stack: Stack) -> None:
    stack.scheduler.script = begins(stack.encode("Hi"))
    body = {"model": "smollm2", "prompt": "x", "stream": True}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body) as response:
        await stack.scheduler.terminate(await stack.scheduler.arrived.get(), "worker_lost")
        *events, end = (await response.text()).split("\n\n")
    assert end == ""
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "Hi"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "worker_lost"
