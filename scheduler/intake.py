"""Readers of the cell's streams: requests and cancels, each on a connection of its own.

An entry stays pending until its request ended (requests) or the engine has it (cancels). After a broken connection
pending entries are read again, because a reply that got lost on its way delivered entries nobody saw.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any, Final, TypeAlias

from redis.asyncio import Redis

from scheduler.arrivals import Arrivals
from scheduler.events import CancelRequested, Event
from scheduler.pending import PendingRequest
from scheduler.publisher import Publisher
from scheduler.redis_io import BLOCK_MS, REDIS_ERRORS, Patience, ensure_groups
from wire import keys
from wire.body import Body
from wire.entries import MAX_ID, CancelEntry, RequestEntry, TerminalReply
from wire.errors import EntryMalformed
from wire.ids import GatewayId, RequestId

log = logging.getLogger(__name__)

READ_COUNT: Final = 256

RawFields: TypeAlias = dict[bytes, bytes]
RawEntry: TypeAlias = tuple[bytes, RawFields | None]
"""Entry id and fields; None when a pending entry was deleted."""


async def read_group(redis: Redis, positions: dict[str, str], *, block_ms: int | None) -> dict[str, list[RawEntry]]:
    """XREADGROUP as the active consumer: per stream, entries after its position; ">" are the undelivered ones."""
    streams: Any = positions  # redis-py's mapping type is invariant
    reply: Any = await redis.xreadgroup(
        keys.SCHEDULER_GROUP, keys.SCHEDULER_CONSUMER, streams, count=READ_COUNT, block=block_ms
    )
    return {stream.decode(): entries for stream, entries in reply or ()}


async def read_pending(redis: Redis, stream: str) -> AsyncIterator[RawEntry]:
    """Every delivered, unacknowledged entry of a stream, oldest first."""
    last = "0"
    while entries := (await read_group(redis, {stream: last}, block_ms=None)).get(stream):
        for entry in entries:
            yield entry
        last = entries[-1][0].decode()


class RequestIntake:
    """Drains the request lanes eagerly: fair order needs the whole backlog."""

    def __init__(self, redis: Redis, cell: str, arrivals: Arrivals, publisher: Publisher) -> None:
        self._redis = redis
        self._lanes = {keys.requests(cell, lane): lane for lane in keys.LANES}
        self._arrivals = arrivals
        self._publisher = publisher

    async def run(self) -> None:
        """Read new entries for ever; recovery has read the pending ones."""
        patience = Patience(log, "reading requests")
        seen_pending = True
        while True:
            try:
                if not seen_pending:
                    await self._read_pending()
                    seen_pending = True
                read = await read_group(self._redis, dict.fromkeys(self._lanes, ">"), block_ms=BLOCK_MS)
                for stream, entries in read.items():
                    for entry_id, raw in entries:
                        await self._take(stream, entry_id, raw)
                patience.success()
            except REDIS_ERRORS as error:
                seen_pending = False
                await patience.after(error)

    async def _read_pending(self) -> None:
        await ensure_groups(self._redis, list(self._lanes))
        for stream in self._lanes:
            async for entry_id, raw in read_pending(self._redis, stream):
                await self._take(stream, entry_id, raw)

    async def _take(self, stream: str, entry_id: bytes, raw: RawFields | None) -> None:
        request = decode_request(self._publisher, self._lanes[stream], entry_id, raw)
        if request is not None:
            await self._arrivals.accept(request)


def decode_request(publisher: Publisher, lane: str, entry_id: bytes, raw: RawFields | None) -> PendingRequest | None:
    """A lane's entry, or None: then it is logged, answered if its sender can be made out, and removed."""
    if not raw:
        publisher.discard(lane, entry_id)
        return None
    try:
        return PendingRequest(RequestEntry.decode(raw), lane, entry_id)
    except EntryMalformed as error:
        log.error("malformed request: %s", error.message, extra={"lane": lane, "entry_id": entry_id.decode()})
        sender = _sender(raw)
        if sender is None:
            publisher.discard(lane, entry_id)
        else:
            request_id, gateway_id = sender
            terminal = TerminalReply(request_id, error_code=error.code, error_message=error.message)
            publisher.finish(gateway_id, lane, entry_id, terminal)
        return None


def _sender(raw: RawFields) -> tuple[RequestId, GatewayId] | None:
    """Request and gateway of an entry that is otherwise unreadable."""
    try:
        body = Body(json.loads(raw[b"body"]), "request entry")
        return RequestId(body.text("id", max_length=MAX_ID)), GatewayId(body.text("gw", max_length=MAX_ID))
    except (KeyError, ValueError, RecursionError, EntryMalformed):
        return None


class ControlIntake:
    """Reads cancels; repeats, unknown and early ones are harmless to the engine."""

    def __init__(self, redis: Redis, cell: str, inbox: asyncio.Queue[Event]) -> None:
        self._redis = redis
        self._stream = keys.control(cell)
        self._inbox = inbox

    async def run(self) -> None:
        patience = Patience(log, "reading cancels")
        seen_pending = False
        while True:
            try:
                if not seen_pending:
                    await ensure_groups(self._redis, [self._stream])
                    await self._take([entry async for entry in read_pending(self._redis, self._stream)])
                    seen_pending = True
                read = await read_group(self._redis, {self._stream: ">"}, block_ms=BLOCK_MS)
                await self._take(read.get(self._stream, []))
                patience.success()
            except REDIS_ERRORS as error:
                seen_pending = False
                await patience.after(error)

    async def _take(self, entries: list[RawEntry]) -> None:
        if not entries:
            return
        for entry_id, raw in entries:
            if not raw:
                continue
            try:
                cancel = CancelEntry.decode(raw)
            except EntryMalformed as error:
                log.error("malformed cancel: %s", error.message, extra={"entry_id": entry_id.decode()})
                continue
            await self._inbox.put(CancelRequested(cancel.request_id, cancel.reason, cancel.choice))
        entry_ids = [entry_id for entry_id, _ in entries]
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.xack(self._stream, keys.SCHEDULER_GROUP, *entry_ids)
            pipe.xdel(self._stream, *entry_ids)
            await pipe.execute()
