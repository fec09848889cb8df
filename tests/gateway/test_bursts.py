"""Many requests at one moment: all that fit get in, the others get 429, and nobody takes a burst for an outage."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.gateway.conftest import Stack, StackOpener
from tests.gateway.scripted_scheduler import Script, ScriptedScheduler, saying
from wire.entries import RequestEntry

MESH_AT_ONCE = 16
"""Requests the scripted scheduler answers at once: it is not the one under test."""


def calmly(script: Script) -> Script:
    at_once = asyncio.Semaphore(MESH_AT_ONCE)

    async def calm(scheduler: ScriptedScheduler, entry: RequestEntry) -> None:
        async with at_once:
            await script(scheduler, entry)

    return calm


class Burst:
    """Requests over a connection each, all sent in one turn of the event loop."""

    def __init__(self, connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
        self._writers = [writer for _, writer in connections]
        body = b'{"model": "smollm2", "prompt": "Hi"}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        for writer in self._writers:
            writer.write(head % len(body) + body)
        self.answers = [asyncio.create_task(_answer(reader)) for reader, _ in connections]

    @classmethod
    @asynccontextmanager
    async def open(cls, stack: Stack, size: int) -> AsyncIterator[Burst]:
        url = urlsplit(stack.url)
        async with asyncio.timeout(60):
            burst = cls([await asyncio.open_connection(url.hostname, url.port) for _ in range(size)])
            try:
                yield burst
            finally:
                burst.leave()
                await asyncio.gather(*burst.answers, return_exceptions=True)

    async def count(self) -> Counter[tuple[int, str | None, str]]:
        return Counter(await asyncio.gather(*self.answers))

    def leave(self) -> None:
        for writer in self._writers:
            writer.close()


async def _answer(reader: asyncio.StreamReader) -> tuple[int, str | None, str]:
    """Status, Retry-After and error code of the answer."""
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    status_line, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    answer = json.loads(body)
    code = answer["error"]["code"] if "error" in answer else "ok"
    return int(status_line.split()[1]), headers.get("Retry-After"), code


async def test_600_requests_at_once_are_all_answered(new_stack: StackOpener, caplog: pytest.LogCaptureFixture) -> None:
    async with new_stack(calmly(saying([2]))) as stack:
        async with Burst.open(stack, 600) as burst:
            assert await burst.count() == {(200, None, "ok"): 600}
        assert await stack.scheduler.live() == 0
        assert stack.scheduler.cancelled.empty()
    assert not [r.message for r in caplog.records if r.name.startswith("gateway") and r.levelname != "INFO"]


@pytest.mark.parametrize(("limit", "size"), [(50, 120), (300, 500)])
async def test_what_does_not_fit_gets_429_and_nothing_else(new_stack: StackOpener, limit: int, size: int) -> None:
    async with (
        new_stack(max_live_requests=limit, card={"predicted_drain_s": 3.2}) as stack,
        Burst.open(stack, size) as burst,
    ):
        entries = [await stack.scheduler.arrived.get() for _ in range(limit)]
        pending = set(burst.answers)
        while len(pending) > limit:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        assert await stack.scheduler.live() == limit
        assert (await stack.health())[0] == 200
        for entry in entries:
            await stack.scheduler.say(entry, [2])
            await stack.scheduler.end(entry, 1)
        assert await burst.count() == {(200, None, "ok"): limit, (429, "4", "overloaded"): size - limit}
        assert stack.scheduler.cancelled.empty()


async def test_a_burst_that_leaves_is_cancelled_whole(new_stack: StackOpener) -> None:
    async with new_stack() as stack, Burst.open(stack, 300) as burst:
        entries = [await stack.scheduler.arrived.get() for _ in range(300)]
        burst.leave()
        cancelled = {(await stack.scheduler.cancelled.get()).request_id for _ in entries}
        assert cancelled == {entry.request_id for entry in entries}
        assert (await stack.health())[0] == 200
        for entry in entries:
            await stack.scheduler.terminate(entry)
