"""What a successor finds after each point at which its predecessor may have died."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from scheduler.events import ChoiceProgress, RequestArrived
from scheduler.redis_io import ensure_groups
from tests.scheduler_service.parts import (
    CELL,
    GATEWAY,
    Parts,
    is_closed,
    replies,
    request_entry,
    submit,
    until,
)
from wire import keys
from wire.entries import ChoiceReply, ReplyEntry, ReplyItem, TerminalReply, TokensReply, pack_tokens
from wire.ids import Fence, GatewayId, RequestId
from wire.journal import TAIL, encode_terminal
from wire.sampling import FinishReason

R = RequestId("r")
OLD_FENCE = Fence(3)


class Predecessor:
    """A scheduler that read request R, published and journaled some of it, and died."""

    def __init__(self, parts: Parts) -> None:
        self.redis = parts.redis

    async def read(self, lane: str = "interactive", **changes: Any) -> None:
        await ensure_groups(self.redis, [keys.requests(CELL, name) for name in keys.LANES])
        await submit(self.redis, request_entry(R, **changes), lane)
        await self.redis.xreadgroup(keys.SCHEDULER_GROUP, keys.SCHEDULER_CONSUMER, {keys.requests(CELL, lane): ">"})

    async def publish(self, *items: ReplyItem, fence: Fence = OLD_FENCE) -> bytes:
        fields: Any = ReplyEntry(fence, list(items)).encode()
        return cast(bytes, await self.redis.xadd(keys.replies(CELL, GATEWAY), fields))

    async def journal(self, **fields: Any) -> None:
        renamed: Any = {name.replace("_", ":"): value for name, value in fields.items()}
        await self.redis.hset(keys.journal(CELL, R), mapping=renamed)


@pytest.fixture
def predecessor(parts: Parts) -> Predecessor:
    return Predecessor(parts)


def tokens(position: int, *ids: int, choice: int = 0) -> TokensReply:
    return TokensReply(R, choice, position, list(ids))


async def recovered(parts: Parts) -> RequestArrived:
    await parts.know_model()
    await parts.recovery.run()
    [event] = parts.events()
    assert isinstance(event, RequestArrived)
    return event


async def flushed(parts: Parts) -> None:
    """Publisher written out, as its task would do."""
    await parts.publisher.flush(5)


async def test_a_request_nothing_was_published_of_starts_from_its_prompt(
    parts: Parts, predecessor: Predecessor
) -> None:
    await predecessor.read("batch")
    event = await recovered(parts)
    assert event.request.prompt == [5, 6, 7, 8] and event.progress == ()


async def test_journal_and_reply_tail_together_are_what_was_published(parts: Parts, predecessor: Predecessor) -> None:
    await predecessor.read(num_choices=2)
    await predecessor.publish(tokens(0, 1, 2), tokens(0, 11, choice=1))
    tail = await predecessor.publish(tokens(2, 3))
    await predecessor.journal(o_0_0=pack_tokens([1, 2, 3]), o_1_0=pack_tokens([11]), **{TAIL: tail})
    await predecessor.publish(tokens(3, 4), TokensReply(RequestId("other"), 0, 0, [77]))
    await predecessor.publish(tokens(1, 12, choice=1), ChoiceReply(R, 1, 2, "stop"))
    event = await recovered(parts)
    assert event.progress == (
        ChoiceProgress(0, [1, 2, 3, 4]),
        ChoiceProgress(1, [11, 12], FinishReason.STOP),
    )


async def test_the_successor_journals_what_its_predecessor_only_published(
    parts: Parts, predecessor: Predecessor
) -> None:
    await predecessor.read()
    await predecessor.publish(tokens(0, *range(20)))
    await recovered(parts)
    parts.terminals.finish(TerminalReply(R))
    await flushed(parts)
    journal = await parts.redis.hgetall(keys.journal(CELL, R))
    assert journal[b"o:0:0"] == pack_tokens(list(range(20)))


async def test_every_live_gateway_gets_a_marker_and_what_comes_behind_it_does_not_count(
    parts: Parts, predecessor: Predecessor
) -> None:
    now = parts.clock.now()
    await parts.redis.zadd(keys.gateways(CELL), {"live": now + 60, "lapsed": now - 60})
    await predecessor.read()
    await predecessor.publish(tokens(0, 1))
    event = await recovered(parts)
    await predecessor.publish(tokens(1, 2))  # it is not dead after all
    assert event.progress == (ChoiceProgress(0, [1]),)
    marker = ReplyEntry(parts.fence, [])
    assert (await replies(parts.redis, GatewayId("live")))[-1] == marker
    assert (await replies(parts.redis))[1] == marker, "the owner of a request gets one even without a lease"
    assert await replies(parts.redis, GatewayId("lapsed")) == []


async def test_replies_of_a_fenced_out_scheduler_do_not_count(parts: Parts, predecessor: Predecessor) -> None:
    await predecessor.read()
    await predecessor.publish(tokens(0, 1))
    await predecessor.publish(fence=Fence(OLD_FENCE + 1))
    await predecessor.publish(tokens(1, 99))
    await predecessor.publish(tokens(1, 2), fence=Fence(OLD_FENCE + 1))
    assert (await recovered(parts)).progress == (ChoiceProgress(0, [1, 2]),)


@pytest.mark.parametrize("in_journal", [False, True])
async def test_a_published_terminal_is_published_again_and_the_request_closed(
    parts: Parts, predecessor: Predecessor, in_journal: bool
) -> None:
    terminal = TerminalReply(R, error_code="worker_lost", error_message="gone")
    await predecessor.read()
    await predecessor.publish(tokens(0, 1), ChoiceReply(R, 0, 1, "error"), terminal)
    if in_journal:
        await parts.redis.delete(keys.replies(CELL, GATEWAY))
        await predecessor.journal(terminal=encode_terminal(OLD_FENCE, terminal))
    await parts.recovery.run()
    await flushed(parts)
    assert (await replies(parts.redis))[-1] == ReplyEntry(parts.fence, [terminal])
    assert await is_closed(parts.redis, R)


async def test_a_request_whose_choices_all_ended_is_ended(parts: Parts, predecessor: Predecessor) -> None:
    await predecessor.read()
    await predecessor.publish(tokens(0, 1, 2), ChoiceReply(R, 0, 2, "length"))
    await parts.recovery.run()
    await flushed(parts)
    [terminal] = (await replies(parts.redis))[-1].items
    assert isinstance(terminal, TerminalReply) and terminal.error_code is None
    assert (terminal.stats.prompt_tokens, terminal.stats.output_tokens) == (4, 2)
    assert await is_closed(parts.redis, R)


async def test_an_end_beyond_a_gap_is_not_believed(parts: Parts, predecessor: Predecessor) -> None:
    await predecessor.read()
    await predecessor.publish(tokens(0, 1), tokens(2, 3), ChoiceReply(R, 0, 3, "length"))
    assert (await recovered(parts)).progress == (ChoiceProgress(0, [1]),)


async def test_a_long_reply_tail_is_read_to_its_end(parts: Parts, predecessor: Predecessor) -> None:
    await predecessor.read()
    for position in range(1100):
        await predecessor.publish(tokens(position, position % 50))
    assert (await recovered(parts)).progress == (ChoiceProgress(0, [p % 50 for p in range(1100)]),)


async def test_a_malformed_pending_entry_does_not_stop_recovery(parts: Parts, predecessor: Predecessor) -> None:
    await predecessor.read()
    lane = keys.requests(CELL, "interactive")
    bad = await parts.redis.xadd(lane, {"v": b"0"})
    gone = await parts.redis.xadd(lane, {"v": b"0"})
    await parts.redis.xreadgroup(keys.SCHEDULER_GROUP, keys.SCHEDULER_CONSUMER, {lane: ">"})
    await parts.redis.xdel(lane, gone)
    await recovered(parts)
    await flushed(parts)
    entries: Any = await parts.redis.xrange(lane)
    assert bad not in [entry_id for entry_id, _ in entries]
    pending: Any = await parts.redis.xpending(lane, keys.SCHEDULER_GROUP)
    assert pending["pending"] == 1
    await until(lambda: parts.redis.sismember(keys.live(CELL), R))


@pytest.fixture
async def neighbour(parts: Parts) -> RequestId:
    """Another gateway's request, in flight as well."""
    await ensure_groups(parts.redis, [keys.requests(CELL, name) for name in keys.LANES])
    entry = request_entry("neighbour", gateway_id=GatewayId("other"))
    await submit(parts.redis, entry)
    await parts.redis.xreadgroup(
        keys.SCHEDULER_GROUP, keys.SCHEDULER_CONSUMER, {keys.requests(CELL, "interactive"): ">"}
    )
    await parts.redis.xadd(
        keys.replies(CELL, entry.gateway_id),
        ReplyEntry(OLD_FENCE, [TokensReply(entry.request_id, 0, 0, [8, 9])]).encode(),
    )
    return entry.request_id


async def progress_of_all(parts: Parts) -> dict[RequestId, tuple[ChoiceProgress, ...]]:
    await parts.know_model()
    async with asyncio.timeout(5):
        await parts.recovery.run()
    return {e.request.request_id: e.progress for e in parts.events() if isinstance(e, RequestArrived)}


async def test_a_journal_of_another_type_costs_its_own_request_only(
    parts: Parts, predecessor: Predecessor, neighbour: RequestId
) -> None:
    await predecessor.read()
    await predecessor.publish(tokens(0, 1))
    await parts.redis.delete(keys.journal(CELL, R))
    await parts.redis.set(keys.journal(CELL, R), "x")
    progress = await progress_of_all(parts)
    assert progress == {R: (ChoiceProgress(0, [1]),), neighbour: (ChoiceProgress(0, [8, 9]),)}


@pytest.mark.parametrize("tail", [b"junk", b"1-x", b"", b"99999999999999999999-0"])
async def test_a_journal_whose_tail_is_no_id_costs_its_own_request_only(
    parts: Parts, predecessor: Predecessor, neighbour: RequestId, tail: bytes
) -> None:
    await predecessor.read()
    await predecessor.publish(tokens(0, 1))
    await predecessor.journal(**{TAIL: tail})
    progress = await progress_of_all(parts)
    assert progress == {R: (ChoiceProgress(0, [1]),), neighbour: (ChoiceProgress(0, [8, 9]),)}


async def test_a_reply_stream_of_another_type_costs_its_own_requests_only(
    parts: Parts, predecessor: Predecessor, neighbour: RequestId
) -> None:
    await predecessor.read()
    await predecessor.journal(o_0_0=pack_tokens([1, 2]))
    await parts.redis.set(keys.replies(CELL, GATEWAY), "x")
    progress = await progress_of_all(parts)
    assert progress == {R: (ChoiceProgress(0, [1, 2]),), neighbour: (ChoiceProgress(0, [8, 9]),)}
    parts.terminals.finish(TerminalReply(R))
    parts.terminals.finish(TerminalReply(neighbour))
    await flushed(parts)
    assert await is_closed(parts.redis, R) and await is_closed(parts.redis, neighbour)
