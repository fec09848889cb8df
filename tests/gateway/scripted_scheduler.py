"""A scheduler that says what the test wrote down: real streams, real cleanup, scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError

from wire import journal, keys
from wire.entries import (
    CancelEntry,
    CellCard,
    ChoiceReply,
    ReplyEntry,
    ReplyItem,
    RequestEntry,
    RequestStats,
    TerminalReply,
    TokensReply,
    pack_tokens,
)
from wire.ids import Fence
from wire.sampling import TokenLogprobs

Script = Callable[["ScriptedScheduler", RequestEntry], Awaitable[None]]

BLOCK_MS = 100
CARD_TTL_MS = 3000
RECONNECT_S = 0.05

_TERMINAL = """
redis.call('SREM', KEYS[1], ARGV[1])
local entry = redis.call('HGET', KEYS[3], 'entry')
if entry then
  redis.call('XACK', KEYS[2], ARGV[2], entry)
  redis.call('XDEL', KEYS[2], entry)
end
redis.call('HSET', KEYS[3], 'terminal', ARGV[3])
redis.call('EXPIRE', KEYS[3], ARGV[4])
"""


class ScriptedScheduler:
    """`async with ScriptedScheduler(redis, cell, script)`: runs `script` for each request that arrives."""

    def __init__(self, redis: Redis, cell: str, script: Script, **card: Any) -> None:
        """`card`: fields of the cell card that differ from the defaults."""
        self.redis = redis
        self.cell = cell
        self.script = script
        self.card = CellCard(
            **{
                "model_name": "smollm2",
                "model_revision": "0123456789abcdef",
                "vocab_size": 49152,
                "max_model_len": 8192,
                "max_request_tokens": 8192,
                "eos_token_ids": [2],
                "num_workers": 1,
                "fence": 1,
                **card,
            }
        )
        self.arrived: asyncio.Queue[RequestEntry] = asyncio.Queue(maxsize=1024)
        self.cancelled: asyncio.Queue[CancelEntry] = asyncio.Queue(maxsize=1024)
        self.scripts: dict[str, asyncio.Task[None]] = {}
        self._terminal = redis.register_script(_TERMINAL)
        self._lanes = [keys.requests(cell, lane) for lane in keys.LANES]
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        await self._create_groups()
        await self.publish_card()
        self._loops = [self._group.create_task(c) for c in (self._read_requests(), self._read_cancels(), self._beat())]
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in (*self._loops, *self.scripts.values()):
            task.cancel()
        await self._group.__aexit__(exc_type, exc, traceback)

    async def publish_card(self) -> None:
        key = keys.cell_card(self.cell)
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=cast(Any, self.card.encode()))
            pipe.pexpire(key, CARD_TTL_MS)
            await pipe.execute()

    async def withdraw_card(self) -> None:
        """Die: no heartbeat any more."""
        self._loops[2].cancel()
        await self.redis.delete(keys.cell_card(self.cell))

    async def live(self) -> int:
        return int(await self.redis.scard(keys.live(self.cell)))

    async def backlog(self) -> int:
        """Entries in the request streams."""
        return sum([int(await self.redis.xlen(lane)) for lane in self._lanes])

    async def reply(self, entry: RequestEntry, *items: ReplyItem, fence: int | None = None) -> None:
        """Publish one reply entry."""
        encoded = ReplyEntry(Fence(self.card.fence if fence is None else fence), list(items)).encode()
        await self.redis.xadd(keys.replies(self.cell, entry.gateway_id), cast(Any, encoded))

    async def say(
        self,
        entry: RequestEntry,
        tokens: Sequence[int],
        *,
        position: int = 0,
        choice: int = 0,
        fence: int | None = None,
    ) -> None:
        """Publish tokens of one choice in one reply."""
        await self.reply(entry, tokens_reply(entry, tokens, position=position, choice=choice), fence=fence)

    async def end(
        self, entry: RequestEntry, num_tokens: int, reason: str = "stop", choice: int = 0, *, cached_tokens: int = 0
    ) -> None:
        """End the request's only choice, and the request."""
        await self.reply(entry, ChoiceReply(entry.request_id, choice, num_tokens, reason))
        await self.terminate(entry, cached_tokens=cached_tokens)

    async def terminate(self, entry: RequestEntry, error_code: str | None = None, *, cached_tokens: int = 0) -> None:
        """Publish the terminal, then clean up, as the scheduler does."""
        stats = RequestStats(
            prompt_tokens=len(entry.prompt),
            cached_tokens=cached_tokens,
            queue_s=0.001,
            prefill_s=0.002,
            transfer_s=0.004,
            decode_s=0.003,
        )
        message = None if error_code is None else f"scripted {error_code}"
        terminal = TerminalReply(entry.request_id, error_code, message, 7.0 if error_code else None, stats)
        await self.reply(entry, terminal)
        lane: Any = await self.redis.hget(keys.journal(self.cell, entry.request_id), "lane") or b"interactive"
        await self._terminal(
            keys=[
                keys.live(self.cell),
                keys.requests(self.cell, lane.decode()),
                keys.journal(self.cell, entry.request_id),
            ],
            args=[
                entry.request_id,
                keys.SCHEDULER_GROUP,
                journal.encode_terminal(Fence(self.card.fence), terminal),
                keys.JOURNAL_RETENTION_S,
            ],
        )

    async def write_journal(self, entry: RequestEntry, choice: int, position: int, tokens: Sequence[int]) -> None:
        key = keys.journal(self.cell, entry.request_id)
        await self.redis.hset(key, journal.output_field(choice, position), pack_tokens(list(tokens)))

    async def _create_groups(self) -> None:
        for lane in self._lanes:
            await self.redis.xgroup_create(lane, keys.SCHEDULER_GROUP, id="0", mkstream=True)

    async def _read_requests(self) -> None:
        while True:
            try:
                read: Any = await self.redis.xreadgroup(
                    keys.SCHEDULER_GROUP,
                    keys.SCHEDULER_CONSUMER,
                    dict.fromkeys(self._lanes, ">"),
                    block=BLOCK_MS,
                )
            except (RedisError, OSError):
                await asyncio.sleep(RECONNECT_S)
                continue
            for _, entries in read:
                for _, raw in entries:
                    entry = RequestEntry.decode(raw)
                    self.arrived.put_nowait(entry)
                    self.scripts[entry.request_id] = self._group.create_task(self._run(entry))

    async def _run(self, entry: RequestEntry) -> None:
        await self.script(self, entry)

    async def _read_cancels(self) -> None:
        last: bytes | str = "0"
        while True:
            try:
                read: Any = await self.redis.xread({keys.control(self.cell): last}, block=BLOCK_MS)
            except (RedisError, OSError):
                await asyncio.sleep(RECONNECT_S)
                continue
            for _, entries in read:
                for entry_id, raw in entries:
                    last = entry_id
                    self.cancelled.put_nowait(CancelEntry.decode(raw))

    async def _beat(self) -> None:
        while True:
            with suppress(RedisError, OSError):
                await self.publish_card()
            await asyncio.sleep(CARD_TTL_MS / 6000)


def tokens_reply(entry: RequestEntry, tokens: Sequence[int], *, position: int = 0, choice: int = 0) -> TokensReply:
    """With made-up log-probabilities when the request wants some: the k likeliest are the token and those after it."""
    logprobs = None
    if (top := entry.sampling.logprobs) is not None:
        logprobs = [TokenLogprobs(-0.5, [t + i for i in range(top)], [-0.5 - i for i in range(top)]) for t in tokens]
    return TokensReply(entry.request_id, choice, position, list(tokens), logprobs)


def saying(output: Sequence[int], reason: str = "stop", *, cached_tokens: int = 0) -> Script:
    """Every choice is `output`, one token a reply, at most max_tokens of it."""

    async def script(scheduler: ScriptedScheduler, entry: RequestEntry) -> None:
        tokens = list(output)[: entry.sampling.max_tokens]
        ending = reason if len(tokens) == len(output) else "length"
        for position, token in enumerate(tokens):
            await scheduler.reply(
                entry,
                *(tokens_reply(entry, [token], position=position, choice=c) for c in range(entry.num_choices)),
            )
        ends = [ChoiceReply(entry.request_id, c, len(tokens), ending) for c in range(entry.num_choices)]
        await scheduler.reply(entry, *ends)
        await scheduler.terminate(entry, cached_tokens=cached_tokens)

    return script


def begins(output: Sequence[int]) -> Script:
    """Says a beginning in one reply; the test goes on by hand."""

    async def script(scheduler: ScriptedScheduler, entry: RequestEntry) -> None:
        await scheduler.say(entry, output)

    return script


async def silent(scheduler: ScriptedScheduler, entry: RequestEntry) -> None:
    """Says nothing: the test goes on by hand."""
