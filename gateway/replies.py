"""The demultiplexer: one task reads this gateway's reply stream and hands each item to the inbox that waits for it.

    replies:<gateway> ──XREAD──▸ fence check ──▸ inbox of the HTTP request
                                     │ gap or silence ──▸ journal, live set

Entries with a fence below the highest seen come from a scheduler that lost its lease and are dropped. Nothing is
lost while Redis is away: reading goes on from the last entry seen. A request that the mesh turns out to have lost
ends in Unavailable, never in a hang.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from redis.asyncio import Redis

from gateway.inbox import Inbox, RequestInbox
from gateway.mesh import Mesh
from gateway.redis_link import REDIS_ERRORS
from observability.metrics import GatewayMetrics
from wire import keys
from wire.entries import CancelEntry, ReplyEntry, ReplyItem, RequestEntry, TerminalReply
from wire.errors import EntryMalformed, MeshError, Unavailable
from wire.ids import Fence, GatewayId, RequestId
from wire.redis_pipe import RedisPipe, stream_entries

log = logging.getLogger("gateway.replies")

BLOCK_MS = 500
"""Well within the bound on a command."""
READ_ENTRIES = 256
RETRY_S = 0.1
MAX_RETRY_S = 2.0
GAP_GRACE_S = 10.0
"""A gap that the journal does not fill for this long never fills."""
AUDIT_S = 5.0
"""A request silent for this long is looked up in the live set; absent twice in a row, it is lost."""
MAX_STRAYS = 4096


class ReplyReader:
    """Owns the inboxes of one gateway. `redis` is its own: it blocks in XREAD."""

    def __init__(
        self,
        redis: Redis,
        cell: str,
        gateway_id: GatewayId,
        mesh: Mesh,
        metrics: GatewayMetrics,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pipe = RedisPipe(redis)
        self._stream = keys.replies(cell, gateway_id)
        self._mesh = mesh
        self._metrics = metrics
        self._now = now
        self._waiting: dict[RequestId, RequestInbox] = {}
        self._gapped: dict[RequestId, RequestInbox] = {}
        self._strays: dict[RequestId, None] = {}  # tokens for nobody: cancelled once; insertion-ordered, bounded
        self._next_audit_s = now() + AUDIT_S
        self._last_id: bytes | None = None
        self._run_id: bytes | None = None
        self._fence = Fence(0)

    def open(self, entries: Sequence[RequestEntry], lane: str) -> Inbox:
        """Start listening for requests; do it before they are submitted, and close the inbox in any case."""
        inbox = Inbox(entries, lane, self._now())
        self._waiting.update((request.request_id, request) for request in inbox.requests)
        return inbox

    def close(self, inbox: Inbox) -> None:
        """Stop listening. What still comes for these requests is expected and dropped."""
        for request in inbox.requests:
            del self._waiting[request.request_id]
            self._gapped.pop(request.request_id, None)
            if request.terminal is None:
                self._remember_stray(request.request_id)

    def fail_all(self, error: MeshError) -> None:
        """End every request that is waiting."""
        for request in self._waiting.values():
            request.owner.fail(error)

    async def run(self) -> None:
        """Read for ever, reconnecting with backoff."""
        retry_s = RETRY_S
        while True:
            try:
                await self.attach()
                while True:
                    await self._read()
                    await self._mend_gaps()
                    await self._audit()
                    retry_s = RETRY_S
            except REDIS_ERRORS as error:
                log.warning("reply stream: %s; again in %.1f s", error, retry_s)
                self._metrics.redis_reconnects.inc()
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, MAX_RETRY_S)

    @property
    def attached(self) -> bool:
        """It is known where to read from: replies to requests submitted from now on are not missed."""
        return self._last_id is not None

    async def attach(self) -> None:
        """Find where to read on; after a restart of Redis also what it may have lost. Raises redis-py's errors."""
        run_id = await self._pipe.run_id()
        if run_id == self._run_id:
            return
        newest = await self._pipe.ask(("XREVRANGE", self._stream, "+", "-", "COUNT", 1))
        end: bytes = newest[0][0] if newest else b"0-0"
        if self._last_id is None or _parse_id(end) < _parse_id(self._last_id):
            self._last_id = end  # at start what is there belongs to an earlier life; later, a lost tail starts anew
        if self._run_id is not None:
            log.warning("Redis restarted: adding unanswered requests again")
            self._fence = Fence(0)  # its counter may have started anew as well
            for request in list(self._waiting.values()):
                if request.unanswered is not None:
                    await self._mesh.resubmit(request.unanswered, request.lane)
        self._run_id = run_id

    async def _read(self) -> None:
        assert self._last_id is not None
        read = ("XREAD", "COUNT", READ_ENTRIES, "BLOCK", BLOCK_MS, "STREAMS", self._stream, self._last_id)
        reply = await self._pipe.ask(read)
        for _, entries in reply or ():
            for entry_id, raw in stream_entries(entries):
                self._last_id = entry_id
                try:
                    self._accept(ReplyEntry.decode(raw))
                except EntryMalformed as error:
                    log.error("reply entry %s skipped: %s", entry_id.decode(), error)

    def _accept(self, entry: ReplyEntry) -> None:
        if entry.fence < self._fence:
            return
        self._fence = entry.fence
        now = self._now()
        for item in entry.items:
            request = self._waiting.get(item.request_id)
            if request is None:
                self._drop(item)
                continue
            request.put(item, now)
            if request.has_gap:
                self._gapped[item.request_id] = request

    def _drop(self, item: ReplyItem) -> None:
        """A reply for nobody: of a former life of this gateway, unless its cancel is still on its way."""
        if isinstance(item, TerminalReply):
            self._strays.pop(item.request_id, None)
        elif item.request_id not in self._strays:
            self._remember_stray(item.request_id)
            self._mesh.cancel(CancelEntry(item.request_id, "disconnect"))

    def _remember_stray(self, request_id: RequestId) -> None:
        self._strays[request_id] = None
        if len(self._strays) > MAX_STRAYS:
            del self._strays[next(iter(self._strays))]

    async def _mend_gaps(self) -> None:
        """Read the journals of requests whose output has a gap. What they do not hold yet may still come."""
        now = self._now()
        for request_id, request in list(self._gapped.items()):
            if request.has_gap:
                await self._recover(request)
            if not request.has_gap:
                self._gapped.pop(request_id, None)
                request.gap_since_s = None
            elif request.gap_since_s is None:
                request.gap_since_s = now
            elif now - request.gap_since_s > GAP_GRACE_S:
                request.owner.fail(Unavailable("part of this request's output was lost"))

    async def _audit(self) -> None:
        """Look after silent requests: one that is no longer live has its end in its journal, or was lost with Redis."""
        now = self._now()
        if now < self._next_audit_s:
            return
        self._next_audit_s = now + AUDIT_S
        silent = [r for r in self._waiting.values() if r.terminal is None and now - r.heard_s > AUDIT_S]
        if not silent:
            return
        live = await self._mesh.which_live([request.request_id for request in silent])
        for request in (request for request, is_live in zip(silent, live, strict=True) if not is_live):
            await self._recover(request)
            if request.terminal is not None:
                continue
            if request.absent:
                log.error("request %s is lost", request.request_id)
                request.owner.fail(Unavailable("the mesh lost this request"))
            request.absent = True

    async def _recover(self, request: RequestInbox) -> None:
        try:
            request.recover(await self._mesh.read_journal(request.request_id))
        except EntryMalformed as error:
            log.error("journal of %s: %s", request.request_id, error)


def _parse_id(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence)
