"""What a new scheduler finds: requests in flight, and how far each of them got (design §9).

    fence taken ─▸ pending entries ─▸ marker into every reply stream ─▸ journals ─▸ reply tails up to the marker

Nothing an older scheduler writes behind our marker counts: gateways drop it, and its journal scripts are refused.
So journal and tail together are exactly what was published. A key that Redis or we cannot read costs what it held:
its request is taken over without.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, cast

from redis.asyncio import Redis

from scheduler.arrivals import Arrivals
from scheduler.clock import Clock
from scheduler.events import ChoiceProgress
from scheduler.intake import decode_request, read_pending
from scheduler.pending import PendingRequest, PendingRequests
from scheduler.publisher import Publisher
from scheduler.redis_io import REDIS_ERRORS, Patience, RefusedKeys, decoded, ensure_groups, execute_each
from scheduler.terminals import Terminals
from wire import keys
from wire.body import U64
from wire.entries import ChoiceReply, ReplyEntry, ReplyItem, RequestStats, TerminalReply, TokensReply
from wire.errors import EntryMalformed
from wire.ids import Fence, GatewayId, RequestId
from wire.journal import Journal, Output
from wire.sampling import FinishReason

log = logging.getLogger(__name__)

PAGE: Final = 500
CLOCK_MARGIN_MS: Final = 5000
"""Request and reply streams of a Redis Cluster live on servers whose clocks may differ by this much."""


@dataclass(slots=True)
class _Found:
    """One request in flight, and what is known to be published of it."""

    request: PendingRequest
    journal: Journal = field(default_factory=Journal)
    """From Redis, then completed from the reply tail."""
    num_journaled: dict[int, int] = field(default_factory=dict)
    """Per choice: tokens that are in the journal."""

    @property
    def request_id(self) -> RequestId:
        return self.request.entry.request_id

    @property
    def gateway_id(self) -> GatewayId:
        return self.request.entry.gateway_id

    def outputs(self) -> list[tuple[int, Output]]:
        num_choices = self.request.entry.num_choices
        return [(choice, out) for choice, out in sorted(self.journal.outputs.items()) if 0 <= choice < num_choices]

    def take_journal(self, raw: dict[bytes, bytes]) -> None:
        """Raises EntryMalformed."""
        journal = Journal.decode(raw)
        if journal.tail is not None and not _is_stream_id(journal.tail):
            raise EntryMalformed(f"journal: tail {journal.tail!r} is no id of a stream entry")
        self.journal = journal
        self.num_journaled = {choice: len(output.tokens) for choice, output in journal.outputs.items()}

    def reads_from(self) -> bytes:
        """Id in the reply stream from which on something may be missing in the journal."""
        if self.journal.tail is not None:
            return self.journal.tail
        return b"%d-0" % max(0, _id_order(self.request.entry_id)[0] - CLOCK_MARGIN_MS)

    def take_reply(self, item: ReplyItem) -> None:
        match item:
            case TokensReply(_, choice, position, tokens):
                self.journal.output(choice).extend(position, tokens)
            case ChoiceReply(_, choice, num_tokens, reason):
                output = self.journal.output(choice)
                output.num_tokens, output.finish_reason = num_tokens, reason
            case TerminalReply():
                self.journal.terminal = item

    def not_journaled(self) -> Iterator[TokensReply | ChoiceReply]:
        """What was published and the journal does not have; ends are repeated, which is harmless."""
        for choice, output in self.outputs():
            have = self.num_journaled.get(choice, 0)
            if len(output.tokens) > have:
                yield TokensReply(self.request_id, choice, have, output.tokens[have:])
            if output.is_whole:
                yield ChoiceReply(self.request_id, choice, len(output.tokens), str(output.finish_reason))

    def is_whole(self) -> bool:
        return sum(output.is_whole for _, output in self.outputs()) == self.request.entry.num_choices

    def progress(self) -> tuple[ChoiceProgress, ...]:
        return tuple(
            ChoiceProgress(choice, output.tokens, _finish_reason(output) if output.is_whole else None)
            for choice, output in self.outputs()
        )


def _finish_reason(output: Output) -> FinishReason | None:
    """None for a reason this build does not know: the choice is then run to its end again."""
    try:
        return FinishReason(output.finish_reason or "")
    except ValueError:
        return None


class Recovery:
    """Runs once, after the lease was taken and before new entries are read."""

    def __init__(
        self,
        redis: Redis,
        cell: str,
        fence: Fence,
        *,
        pending: PendingRequests,
        arrivals: Arrivals,
        terminals: Terminals,
        publisher: Publisher,
        clock: Clock,
    ) -> None:
        self._redis = redis
        self._cell = cell
        self._fence = fence
        self._pending = pending
        self._arrivals = arrivals
        self._terminals = terminals
        self._publisher = publisher
        self._clock = clock
        self._refused = RefusedKeys(log)

    async def run(self) -> None:
        """Take over every request in flight. While Redis is away, tries on; nothing is handed on before all is read."""
        patience = Patience(log, "recovery")
        while True:
            try:
                found, markers = await self._read()
                break
            except REDIS_ERRORS as error:
                await patience.after(error)
        for one in found:
            await self._resume(one, markers[one.gateway_id])
        log.info("recovery done", extra={"requests": len(found)})

    async def _read(self) -> tuple[list[_Found], dict[GatewayId, bytes | None]]:
        found = await self._read_lanes()
        by_gateway: dict[GatewayId, list[_Found]] = {}
        for one in found:
            by_gateway.setdefault(one.gateway_id, []).append(one)
        markers = await self._write_markers(by_gateway)
        await self._read_journals(found)
        for gateway_id, ours in by_gateway.items():
            if (marker := markers[gateway_id]) is not None:
                await self._read_tail(gateway_id, {one.request_id: one for one in ours}, marker)
        return found, markers

    async def _read_lanes(self) -> list[_Found]:
        await ensure_groups(self._redis, [keys.requests(self._cell, lane) for lane in keys.LANES])
        found: list[_Found] = []
        for lane in keys.LANES:
            async for entry_id, raw in read_pending(self._redis, keys.requests(self._cell, lane)):
                request = decode_request(self._publisher, lane, entry_id, raw)
                if request is not None:
                    found.append(_Found(request))
        return found

    async def _write_markers(self, owners: Iterable[GatewayId]) -> dict[GatewayId, bytes | None]:
        """Write our fence into the reply streams of live gateways and of those that own a request; ids by gateway,
        None where the stream refused it."""
        live = await self._redis.zrangebyscore(keys.gateways(self._cell), self._clock.now(), "+inf")
        gateways = list({*owners, *map(GatewayId, decoded(live))})
        marker: Any = ReplyEntry(self._fence, []).encode()
        async with self._redis.pipeline(transaction=False) as pipe:
            for gateway_id in gateways:
                stream = keys.replies(self._cell, gateway_id)
                pipe.xadd(stream, marker, maxlen=keys.REPLIES_MAX_ENTRIES, approximate=True)
                pipe.expire(stream, keys.REPLIES_IDLE_TTL_S)
            results = (await execute_each(pipe))[::2]
        return {
            gateway_id: None if self._refused.note(keys.replies(self._cell, gateway_id), result) else result
            for gateway_id, result in zip(gateways, results, strict=True)
        }

    async def _read_journals(self, found: list[_Found]) -> None:
        for start in range(0, len(found), PAGE):
            page = found[start : start + PAGE]
            async with self._redis.pipeline(transaction=False) as pipe:
                for one in page:
                    pipe.hgetall(keys.journal(self._cell, one.request_id))
                raws = await execute_each(pipe)
            for one, raw in zip(page, raws, strict=True):
                if self._refused.note(keys.journal(self._cell, one.request_id), raw):
                    continue
                try:
                    one.take_journal(raw)
                except EntryMalformed as error:
                    log.error("journal unreadable: %s", error.message, extra={"request_id": one.request_id})

    async def _read_tail(self, gateway_id: GatewayId, ours: dict[RequestId, _Found], marker: bytes) -> None:
        stream = keys.replies(self._cell, gateway_id)
        position = min((one.reads_from() for one in ours.values()), key=_id_order)
        highest = Fence(0)
        while True:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.xrange(stream, min=position, max=marker, count=PAGE)
                [result] = await execute_each(pipe)
            if self._refused.note(stream, result):
                return
            page = cast(list[tuple[bytes, dict[bytes, bytes]]], result)
            for entry_id, raw in page:
                try:
                    entry = ReplyEntry.decode(raw)
                except EntryMalformed as error:
                    log.error("reply unreadable: %s", error.message, extra={"entry_id": entry_id.decode()})
                    continue
                if entry.fence < highest:
                    continue  # gateways dropped it too
                highest = entry.fence
                for item in entry.items:
                    if item.request_id in ours:
                        ours[item.request_id].take_reply(item)
            if len(page) < PAGE:
                return
            position = b"(" + page[-1][0]

    async def _resume(self, one: _Found, marker: bytes | None) -> None:
        """Go on with a request, or end it when all it lacks is its end."""
        for item in one.not_journaled():
            self._publisher.drafts.note(item, marker, self._clock.now())
        terminal = one.journal.terminal
        if terminal is None and one.is_whole():
            output_tokens = sum(len(output.tokens) for _, output in one.outputs())
            stats = RequestStats(prompt_tokens=len(one.request.entry.prompt), output_tokens=output_tokens)
            terminal = TerminalReply(one.request_id, stats=stats)
        if terminal is None:
            await self._arrivals.accept(one.request, one.progress())
        else:
            self._pending.add(one.request)
            self._terminals.finish(terminal)


def _is_stream_id(text: bytes) -> bool:
    return re.fullmatch(rb"[0-9]{1,20}(-[0-9]{1,20})?", text) is not None and max(_id_order(text)) <= U64


def _id_order(entry_id: bytes) -> tuple[int, int]:
    """Order of stream ids."""
    ms, _, sequence = entry_id.partition(b"-")
    return int(ms), int(sequence or 0)
