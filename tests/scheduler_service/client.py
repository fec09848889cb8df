"""A gateway's side of the mesh in few lines: submits requests and puts replies in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from scheduler.redis_io import REDIS_ERRORS
from tests.engine.paged_worker import expected_output
from tests.scheduler_service.parts import CELL, GATEWAY, submit
from wire import keys
from wire.entries import CancelEntry, ChoiceReply, ReplyEntry, RequestEntry, TerminalReply, TokensReply
from wire.ids import RequestId
from wire.redis_client import open_redis


class Stream:
    """One request as its client sees it."""

    def __init__(self, entry: RequestEntry) -> None:
        self.entry = entry
        self.outputs: list[list[int]] = [[] for _ in range(entry.num_choices)]
        self.finish_reasons: dict[int, str] = {}
        self.terminal: TerminalReply | None = None
        self.changed = asyncio.Condition()

    def take(self, item: TokensReply | ChoiceReply | TerminalReply) -> None:
        match item:
            case TokensReply(_, choice, position, tokens):
                output = self.outputs[choice]
                repeated = output[position : position + len(tokens)]
                assert repeated == tokens[: len(repeated)], "a repeat must say the same"
                if position <= len(output):
                    output += tokens[len(output) - position :]
            case ChoiceReply(_, choice, num_tokens, reason):
                assert len(self.outputs[choice]) == num_tokens
                self.finish_reasons[choice] = reason
            case TerminalReply():
                assert self.terminal is None or self.terminal.error_code == item.error_code, "two different terminals"
                self.terminal = item

    async def until(self, num_tokens: int, timeout_s: float = 10.0) -> None:
        """Wait until the first choice has so many tokens."""
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: len(self.outputs[0]) >= num_tokens or self.terminal is not None)
        assert len(self.outputs[0]) >= num_tokens

    async def finished(self, timeout_s: float = 10.0) -> TerminalReply:
        async with asyncio.timeout(timeout_s), self.changed:
            await self.changed.wait_for(lambda: self.terminal is not None)
        assert self.terminal is not None
        return self.terminal

    async def finished_right(self, timeout_s: float = 10.0) -> None:
        """Ends without an error and with exactly the tokens an undisturbed run gives."""
        terminal = await self.finished(timeout_s)
        assert terminal.error_code is None, terminal
        wanted = expected_output(self.entry.prompt, self.entry.sampling)
        assert self.outputs == [wanted] * self.entry.num_choices


class Gateway:
    """Reads its reply stream; drops fences below the highest it saw, as gateways do."""

    def __init__(self, redis: Redis) -> None:
        self.redis: Any = redis
        self.streams: dict[RequestId, Stream] = {}
        self._fence = 0

    async def submit(self, entry: RequestEntry, lane: str = "interactive") -> Stream:
        stream = self.streams[entry.request_id] = Stream(entry)
        await submit(self.redis, entry, lane)
        return stream

    async def cancel(self, request_id: str, reason: str = "disconnect") -> None:
        await self.redis.xadd(keys.control(CELL), CancelEntry(RequestId(request_id), reason).encode())

    async def run(self) -> None:
        position = b"0"
        while True:
            try:
                await self.redis.zadd(keys.gateways(CELL), {GATEWAY: time.time() + keys.GATEWAY_LEASE_TTL_S})
                for _, entries in await self.redis.xread({keys.replies(CELL, GATEWAY): position}, block=200) or ():
                    for entry_id, raw in entries:
                        position = entry_id
                        await self._take(ReplyEntry.decode(raw))
            except REDIS_ERRORS:
                await asyncio.sleep(0.05)

    async def _take(self, entry: ReplyEntry) -> None:
        if entry.fence < self._fence:
            return
        self._fence = entry.fence
        for item in entry.items:
            stream = self.streams[item.request_id]
            stream.take(item)
            async with stream.changed:
                stream.changed.notify_all()


@asynccontextmanager
async def gateway(redis_url: str) -> AsyncIterator[Gateway]:
    async with open_redis(redis_url, cell=CELL) as redis:
        built = Gateway(redis)
        task = asyncio.create_task(built.run())
        try:
            yield built
        finally:
            task.cancel()
            done, _ = await asyncio.wait([task])
            for finished in done:
                if not finished.cancelled() and finished.exception() is not None:
                    raise finished.exception()  # type: ignore[misc]
