"""Work nobody waits for is cancelled in the mesh: clients that leave, stop strings, slow readers."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import Stack, StackOpener
from tests.gateway.scripted_scheduler import ScriptedScheduler, saying
from wire.entries import CancelEntry, RequestEntry
from wire.ids import RequestId
from wire.sampling import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")


class RawClient:
    """A connection that sends one request and reads only when told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def post(cls, stack: Stack, **body: object) -> RawClient:
        url = urlsplit(stack.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port, limit=4096)
        raw = json.dumps({"model": "smollm2", "prompt": "Hello", **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        await writer.drain()
        return cls(reader, writer)

    async def leave(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


async def cancel_of(stack: Stack) -> CancelEntry:
    async with asyncio.timeout(2):
        return await stack.scheduler.cancelled.get()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_is_cancelled(stack: Stack, stream: bool) -> None:
    client = await RawClient.post(stack, stream=stream)
    entry = await stack.scheduler.arrived.get()
    await client.leave()
    cancel = await cancel_of(stack)
    assert (cancel.request_id, cancel.reason, cancel.choice) == (entry.request_id, "disconnect", None)
    await stack.scheduler.terminate(entry)
    assert await stack.scheduler.live() == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_amid_its_tokens_is_cancelled(stack: Stack, stream: bool) -> None:
    client = await RawClient.post(stack, stream=stream)
    entry = await stack.scheduler.arrived.get()
    await stack.scheduler.say(entry, stack.encode("Hello"))
    if stream:
        await client.reader.readuntil(b"Hello")
    await client.leave()
    assert (await cancel_of(stack)).reason == "disconnect"
    # What is under way still comes; it is for nobody, and no reason to cancel again.
    await stack.scheduler.say(entry, stack.encode(" world"), position=1)
    await stack.scheduler.terminate(entry)
    stack.scheduler.script = saying([2])
    assert (await stack.complete())[0] == 200
    assert stack.scheduler.cancelled.empty()


async def test_every_prompt_of_a_client_that_leaves_is_cancelled(stack: Stack) -> None:
    client = await RawClient.post(stack, prompt=["one", "two", "three"])
    entries = [await stack.scheduler.arrived.get() for _ in range(3)]
    await stack.scheduler.say(entries[1], [2])
    await stack.scheduler.end(entries[1], 1)
    await client.leave()
    assert {(await cancel_of(stack)).request_id for _ in range(2)} == {entries[0].request_id, entries[2].request_id}
    for entry in entries:
        await stack.scheduler.terminate(entry)


async def test_a_stop_string_over_several_tokens_ends_the_choice_at_once(stack: Stack) -> None:
    """Nothing of the stop string is seen, the scheduler is told, and its terminal is not waited for."""
    tokens = stack.encode("One two. END of it")
    for stream in (False, True):
        answer = asyncio.create_task(stack.complete(stop=["END"], stream=False)) if not stream else None
        client = await RawClient.post(stack, stop=["END"], stream=True) if stream else None
        entry = await stack.scheduler.arrived.get()
        for position, token in enumerate(tokens):
            await stack.scheduler.say(entry, [token], position=position)
        cancel = await cancel_of(stack)
        assert (cancel.request_id, cancel.reason, cancel.choice) == (entry.request_id, "stop", 0)
        if answer is not None:
            status, body = await answer
            assert status == 200
            assert body["choices"][0]["text"] == "One two. "
            assert body["choices"][0]["finish_reason"] == "stop"
            assert body["usage"]["completion_tokens"] < len(tokens)
            assert body["usage"]["prompt_tokens_details"] is None
        if client is not None:
            seen = (await client.reader.readuntil(b"[DONE]")).decode()
            assert '"finish_reason":"stop"' in seen
            assert '"E' not in seen
            await client.leave()
        await stack.scheduler.terminate(entry)
    assert stack.scheduler.cancelled.empty()


async def test_include_stop_str_in_output_shows_it(stack: Stack) -> None:
    stack.scheduler.script = saying(stack.encode("One two. END of it"))
    _, body = await stack.complete(stop="END", include_stop_str_in_output=True, max_tokens=64)
    assert body["choices"][0]["text"] == "One two. END"


async def test_a_stop_string_in_one_choice_leaves_the_other_running(stack: Stack) -> None:
    answer = asyncio.create_task(stack.complete(stop="!", n=2))
    entry = await stack.scheduler.arrived.get()
    await stack.scheduler.say(entry, stack.encode("Hi!"), choice=1)
    cancel = await cancel_of(stack)
    assert (cancel.reason, cancel.choice) == ("stop", 1)
    await stack.scheduler.say(entry, [*stack.encode("Hello"), 2], choice=0)
    await stack.scheduler.end(entry, len(stack.encode("Hello")) + 1, choice=0)
    status, body = await answer
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == ["Hello", "Hi"]


async def test_what_might_be_a_stop_string_and_is_none_is_shown_at_the_end(stack: Stack) -> None:
    stack.scheduler.script = saying(stack.encode("One EN"))
    _, body = await stack.complete(stop="END", max_tokens=64)
    assert body["choices"][0]["text"] == "One EN"


async def test_a_slow_reader_holds_up_only_itself(new_stack: StackOpener) -> None:
    """A client that does not read: its tokens wait in the gateway, merged; others are served; then it gets them all."""
    num_tokens = 60_000

    async def flood(scheduler: ScriptedScheduler, entry: RequestEntry) -> None:
        for position in range(0, num_tokens, 500):
            await scheduler.say(entry, [5] * 500, position=position)
        await scheduler.end(entry, num_tokens, "length")

    card = {"max_model_len": 131072, "max_request_tokens": 131072}
    async with new_stack(flood, card=card) as stack:
        client = await RawClient.post(stack, stream=True, max_tokens=num_tokens)
        entry = await stack.scheduler.arrived.get()
        async with asyncio.timeout(20):
            await stack.scheduler.scripts[entry.request_id]
        stack.scheduler.script = saying([2])
        assert (await stack.complete())[0] == 200
        received = b""
        async with asyncio.timeout(20):
            while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                received += await client.reader.read(2**20)
        assert received.count(b'"finish_reason":null') == num_tokens
        await client.leave()
        assert stack.scheduler.cancelled.empty()


async def test_a_slow_reader_that_leaves_is_cancelled(new_stack: StackOpener) -> None:
    async with new_stack(card={"max_model_len": 131072, "max_request_tokens": 131072}) as stack:
        client = await RawClient.post(stack, stream=True)
        entry = await stack.scheduler.arrived.get()
        for position in range(0, 60_000, 500):
            await stack.scheduler.say(entry, [5] * 500, position=position)
        await client.reader.readuntil(b"data: ")
        client.writer.transport.abort()
        assert (await cancel_of(stack)).request_id == entry.request_id
        await stack.scheduler.terminate(entry)


async def test_tokens_of_a_former_life_are_cancelled_once(stack: Stack) -> None:
    """A gateway that crashed and came back under its name ends what it had asked for."""
    stray = RequestEntry(RequestId("cmpl-of-a-former-life"), stack.parts.gateway_id, [1], SamplingParams(max_tokens=8))
    for position in range(3):
        await stack.scheduler.say(stray, [5], position=position)
    assert (await cancel_of(stack)).request_id == "cmpl-of-a-former-life"
    stack.scheduler.script = saying([2])
    assert (await stack.complete())[0] == 200
    assert stack.scheduler.cancelled.empty()
