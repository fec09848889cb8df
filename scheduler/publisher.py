"""The scheduler's whole output to Redis, in order: replies, then journals, then ends of requests.

    publish(), finish() ─▸ batch ─▸ XADD replies:<gateway> ─▸ journal drafts ─▸ APPEND scripts
                                                └─▸ closings ─▸ END scripts

Each arrow may fail and is tried again; every step is idempotent (readers drop what they have, by position). What Redis
refuses because of its key is dropped instead: it costs one gateway or one request, and must not stop the others. While
Redis is away the batch grows up to MAX_BUFFERED items, then the service waits, and the workers with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError

from observability.metrics import SchedulerMetrics
from scheduler.clock import Clock
from scheduler.journal import JournalDrafts, append_call, end_call, remove_call
from scheduler.lease import Lease
from scheduler.pending import PendingRequest, PendingRequests
from scheduler.redis_io import REDIS_ERRORS, Patience, RefusedKeys, each_of_its_key
from wire import keys
from wire.entries import RedisFields, ReplyEntry, ReplyItem, TerminalReply, TokensReply
from wire.errors import FenceLost
from wire.ids import GatewayId, RequestId
from wire.redis_client import open_redis
from wire.redis_pipe import Command, RedisPipe, run_id_of, xadd

log = logging.getLogger(__name__)

MAX_BUFFERED: Final = 100_000
"""Items, about 100 bytes each."""
MAX_ENTRY_ITEMS: Final = 512
MAX_PIPELINE: Final = 256
RENEW_TTL_S: Final = 60.0
"""A reply stream's time to live, an hour, begins anew this often, not with each entry."""
IDLE_CHECK_S: Final = 1.0
REPUBLISH_S: Final = 5.0
"""A Redis that restarted may have lost its last second; it gets this much again."""


@dataclass(frozen=True, slots=True)
class _Closing:
    """A stream entry whose terminal is, or is about to be, published."""

    lane: str
    entry_id: bytes
    terminal: TerminalReply


@dataclass(slots=True)
class _Batch:
    replies: dict[GatewayId, list[ReplyItem]] = field(default_factory=dict)
    closings: list[_Closing] = field(default_factory=list)
    num_items: int = 0
    """As they were handed in."""
    open_tokens: dict[tuple[GatewayId, RequestId, int], TokensReply] = field(default_factory=dict)
    """The last tokens of each choice, which those of its next steps join."""

    def add(self, gateway_id: GatewayId, item: ReplyItem) -> None:
        self.num_items += 1
        if isinstance(item, TokensReply):
            key = gateway_id, item.request_id, item.choice
            if _join(self.open_tokens.get(key), item):
                return
            self.open_tokens[key] = item
        self.replies.setdefault(gateway_id, []).append(item)


def _join(earlier: TokensReply | None, item: TokensReply) -> bool:
    """Append tokens to those right before them; False when that is not what they are. Both are ours to change."""
    if earlier is None or earlier.position + len(earlier.tokens) != item.position:
        return False
    if earlier.logprobs is not None and item.logprobs is not None:
        earlier.logprobs += item.logprobs
    elif earlier.logprobs is not None or item.logprobs is not None:
        return False
    earlier.tokens += item.tokens
    return True


@dataclass(frozen=True, slots=True)
class _Sent:
    sent_s: float
    gateway_id: GatewayId
    fields: RedisFields


class Publisher:
    """Takes output without waiting; run() writes it. Made anew for each time the lease is held."""

    def __init__(
        self, redis_url: str, cell: str, lease: Lease, pending: PendingRequests, clock: Clock, metrics: SchedulerMetrics
    ) -> None:
        self._redis = open_redis(redis_url, cell=cell, on_connect=self._on_connect)
        self._pipe = RedisPipe(self._redis)
        self._cell = cell
        self._lease = lease
        self._fence = lease.fence
        self._pending = pending
        self._clock = clock
        self._metrics = metrics
        self.drafts = JournalDrafts()
        self._next = _Batch()
        self._sending: _Batch | None = None
        self._closings: list[_Closing] = []  # published, not yet closed
        self._discards: list[tuple[str, bytes]] = []
        self._sent: deque[_Sent] = deque()
        self._ttl_renewed_s: dict[GatewayId, float] = {}
        self._refused = RefusedKeys(log)
        self._run_id: bytes | None = None
        self._redis_restarted = False
        self._work = asyncio.Event()
        self._room = asyncio.Event()

    # -- what others hand in -----------------------------------------------------------------------------------

    def publish(self, gateway_id: GatewayId, item: ReplyItem) -> None:
        """Take an item over, to publish it. Tokens of several steps that wait together go out as one item."""
        self._next.add(gateway_id, item)
        self._work.set()

    def finish(self, gateway_id: GatewayId, lane: str, entry_id: bytes, terminal: TerminalReply) -> None:
        """Publish a request's terminal, then close its journal and remove its entry."""
        self.publish(gateway_id, terminal)
        self._next.closings.append(_Closing(lane, entry_id, terminal))

    def discard(self, lane: str, entry_id: bytes) -> None:
        """Remove a request's entry without ending a request."""
        self._discards.append((keys.requests(self._cell, lane), entry_id))
        self._work.set()

    async def wait_for_room(self) -> None:
        """Wait while the buffer is full."""
        while self._next.num_items >= MAX_BUFFERED:
            self._room.clear()
            await self._room.wait()

    # -- the writing task --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write for ever. Raises FenceLost when a script says that another scheduler is active."""
        patience = Patience(log, "publishing")
        while True:
            has_work = await self._wait_for_work()
            try:
                if not has_work:
                    await self._execute([("PING",)])  # notices a restart although nothing is published
                await self._write()
            except REDIS_ERRORS as error:
                self._work.set()
                await patience.after(error)
            else:
                patience.success()

    async def flush(self, timeout_s: float) -> None:
        """Write what is left, once run() has ended; gives up silently after timeout_s or when Redis is away."""
        with suppress(TimeoutError, FenceLost, *REDIS_ERRORS):
            async with asyncio.timeout(timeout_s):
                while self._next.num_items or self._sending or self._closings or self._discards:
                    await self._write()

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def _wait_for_work(self) -> bool:
        """Wait for output, a draft that is due, or IDLE_CHECK_S (then False)."""
        due_s = self.drafts.next_due_s()
        wait_s = IDLE_CHECK_S if due_s is None else min(IDLE_CHECK_S, max(0.0, due_s - self._clock.now()))
        timer = asyncio.get_running_loop().call_later(wait_s, self._work.set)  # a timeout costs five times as much
        try:
            await self._work.wait()
        finally:
            timer.cancel()
        self._work.clear()
        return due_s is not None or bool(self._next.num_items or self._discards)

    async def _write(self) -> None:
        if self._redis_restarted:
            await self._republish()
        await self._send_replies()
        await self._flush_journals()
        await self._close_requests()
        await self._drop_discards()

    async def _send_replies(self) -> None:
        if self._sending is None:
            if not self._next.num_items:
                return
            self._sending, self._next = self._next, _Batch()
            self._room.set()
        batch = self._sending
        entries = [
            (gateway_id, items[start : start + MAX_ENTRY_ITEMS])
            for gateway_id, items in batch.replies.items()
            for start in range(0, len(items), MAX_ENTRY_ITEMS)
        ]
        now = self._clock.now()
        sent = [_Sent(now, gateway_id, ReplyEntry(self._fence, items).encode()) for gateway_id, items in entries]
        reply_ids = await self._xadd(sent)
        for (_, items), reply_id in zip(entries, reply_ids, strict=True):
            for item in items:
                if not isinstance(item, TerminalReply):
                    self.drafts.note(item, reply_id, now)
        self._closings += batch.closings
        self._sending = None
        self._remember([entry for entry, reply_id in zip(sent, reply_ids, strict=True) if reply_id], now)

    async def _xadd(self, entries: Sequence[_Sent]) -> list[bytes | None]:
        """Ids of the new reply entries, in order; None for one that its gateway's stream refused."""
        now = self._clock.now()
        gateways = {entry.gateway_id for entry in entries}
        renewed = [g for g in gateways if now - self._ttl_renewed_s.get(g, -inf) >= RENEW_TTL_S]
        commands = [
            xadd(keys.replies(self._cell, entry.gateway_id), entry.fields, max_entries=keys.REPLIES_MAX_ENTRIES)
            for entry in entries
        ]
        commands += [
            ("EXPIRE", keys.replies(self._cell, gateway_id), keys.REPLIES_IDLE_TTL_S) for gateway_id in renewed
        ]
        results = (await self._execute(commands))[: len(entries)]
        if renewed:
            fresh = {g: renewed_s for g, renewed_s in self._ttl_renewed_s.items() if now - renewed_s < RENEW_TTL_S}
            self._ttl_renewed_s = fresh | dict.fromkeys(renewed, now)
        return [
            None if self._refused.note(keys.replies(self._cell, entry.gateway_id), result) else result
            for entry, result in zip(entries, results, strict=True)
        ]

    def _remember(self, sent: Sequence[_Sent], now: float) -> None:
        self._sent.extend(sent)
        while self._sent and self._sent[0].sent_s < now - REPUBLISH_S:
            self._sent.popleft()

    async def _flush_journals(self) -> None:
        closing = {closing.terminal.request_id for closing in self._closings}
        due = [request_id for request_id in self.drafts.due(self._clock.now()) if request_id not in closing]
        for start in range(0, len(due), MAX_PIPELINE):
            part = due[start : start + MAX_PIPELINE]
            calls = [append_call(self._cell, self._fence, r, self.drafts.fields(r)) for r in part]
            for request_id, result in zip(part, await self._run_scripts(calls), strict=True):
                self._refused.note(keys.journal(self._cell, request_id), result)
            self._written(part)

    async def _close_requests(self) -> None:
        while self._closings:
            part = self._closings[:MAX_PIPELINE]
            results = await self._run_scripts([self._end_call(closing) for closing in part])
            refused = [
                closing
                for closing, result in zip(part, results, strict=True)
                if self._refused.note(keys.journal(self._cell, closing.terminal.request_id), result)
            ]
            await self._run_scripts([self._remove_call(closing) for closing in refused])
            self._written([closing.terminal.request_id for closing in part])
            del self._closings[: len(part)]

    def _end_call(self, closing: _Closing) -> list[Any]:
        fields = self.drafts.fields(closing.terminal.request_id)
        return end_call(self._cell, self._fence, closing.lane, closing.entry_id, closing.terminal, fields)

    def _remove_call(self, closing: _Closing) -> list[Any]:
        return remove_call(self._cell, self._fence, closing.lane, closing.entry_id, closing.terminal.request_id)

    def _written(self, request_ids: Sequence[RequestId]) -> None:
        for request_id in request_ids:
            self.drafts.written(request_id)

    async def _run_scripts(self, calls: Sequence[list[Any]]) -> list[Any]:
        """Run fenced scripts; results as of _execute. Raises FenceLost, or a Redis error when the fence is still
        ours: then try again."""
        if not calls:
            return []
        results = await self._execute([("EVAL", *call) for call in calls])
        if 0 in results:
            await self._lease.confirm()
            raise RedisConnectionError("Redis had forgotten our fence")
        return results

    async def _drop_discards(self) -> None:
        while self._discards:
            stream, entry_id = self._discards[0]
            acked = ("XACK", stream, keys.SCHEDULER_GROUP, entry_id)
            for result in await self._execute([acked, ("XDEL", stream, entry_id)]):
                self._refused.note(stream, result)
            del self._discards[0]

    async def _execute(self, commands: Sequence[Command]) -> list[Any]:
        return each_of_its_key(await self._pipe.execute(commands))

    # -- a Redis that came back as another process -------------------------------------------------------------

    async def _on_connect(self, connection: AbstractConnection) -> None:
        """Greet, and compare the server's run id. Raises when it changed, so that nothing is written before
        _republish."""
        await connection.on_connect()
        await connection.send_command("INFO", "server")
        info: bytes = await connection.read_response()
        run_id = run_id_of(info)
        last, self._run_id = self._run_id, run_id
        if last is not None:
            self._metrics.redis_reconnects.inc()
        if last not in (None, run_id):
            self._redis_restarted = True
            raise RedisConnectionError("Redis was restarted")

    async def _republish(self) -> None:
        """Give a restarted Redis what it may have lost: the requests we run, and the replies of the last seconds."""
        await self._lease.confirm()
        self._ttl_renewed_s.clear()
        requests = self._pending.all()
        for start in range(0, len(requests), MAX_PIPELINE):
            await self._restore(requests[start : start + MAX_PIPELINE])
        sent = list(self._sent)
        for start in range(0, len(sent), MAX_PIPELINE):
            await self._xadd(sent[start : start + MAX_PIPELINE])
        self._redis_restarted = False
        log.info("Redis was restarted; replies published again", extra={"entries": len(sent)})

    async def _restore(self, requests: Sequence[PendingRequest]) -> None:
        """Count requests as live again and add lost entries anew, for a successor; our intake takes them as repeats."""
        look: list[Command] = []
        for request in requests:
            lane, entry_id = keys.requests(self._cell, request.lane), request.entry_id
            look += [("SADD", keys.live(self._cell), request.entry.request_id), ("XRANGE", lane, entry_id, entry_id)]
        found = (await self._execute(look))[1::2]
        await self._execute(
            [
                xadd(keys.requests(self._cell, request.lane), request.entry.encode())
                for request, entry in zip(requests, found, strict=True)
                if not entry  # neither found nor refused
            ]
        )
