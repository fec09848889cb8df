from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from scheduler import publisher as publisher_module
from scheduler.lease import Lease
from scheduler.pending import PendingRequest
from scheduler.redis_io import ensure_groups
from tests.redis_fixture import RedisServer
from tests.scheduler_service.parts import (
    CELL,
    GATEWAY,
    Parts,
    is_closed,
    journal_of,
    replies,
    reply_items,
    request_entry,
    submit,
    until,
)
from wire import keys
from wire.entries import ChoiceReply, ReplyItem, TerminalReply, TokensReply
from wire.errors import FenceLost
from wire.ids import GatewayId, RequestId
from wire.redis_client import open_redis
from wire.sampling import TokenLogprobs

R = RequestId("r")


def tokens(position: int, *ids: int) -> TokensReply:
    return TokensReply(R, 0, position, list(ids))


@asynccontextmanager
async def running(parts: Parts) -> AsyncIterator[None]:
    task = asyncio.create_task(parts.publisher.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_a_turn_is_one_entry_per_gateway_with_all_its_items_in_order(parts: Parts) -> None:
    other = GatewayId("other")
    items: list[ReplyItem] = [tokens(0, 1), ChoiceReply(R, 0, 1, "stop"), TokensReply(R, 1, 0, [7])]
    for item in items:
        parts.publisher.publish(GATEWAY, item)
    parts.publisher.publish(other, tokens(0, 9))
    async with running(parts):
        await until(lambda: _published(parts.redis, other, 1))
    [entry] = await replies(parts.redis)
    assert entry.items == items and entry.fence == parts.fence
    assert [e.items for e in await replies(parts.redis, other)] == [[tokens(0, 9)]]
    assert await parts.redis.ttl(keys.replies(CELL, GATEWAY)) > 0


async def test_tokens_of_several_steps_that_wait_together_are_one_item(parts: Parts) -> None:
    other = GatewayId("other")
    named = [TokenLogprobs(-0.5, [], [])]
    for gateway, item in (
        (GATEWAY, tokens(0, 1)),
        (GATEWAY, TokensReply(R, 1, 0, [5])),
        (GATEWAY, tokens(1, 2, 3)),
        (other, tokens(3, 9)),  # of another gateway since
        (GATEWAY, tokens(3, 4)),
        (GATEWAY, tokens(6, 7)),  # beyond a gap
        (GATEWAY, TokensReply(R, 1, 1, [6], list(named))),
        (GATEWAY, TokensReply(R, 1, 2, [7], list(named))),
    ):
        parts.publisher.publish(gateway, item)
    async with running(parts):
        await until(lambda: _published(parts.redis, other, 1))
    assert await reply_items(parts.redis) == [
        tokens(0, 1, 2, 3, 4),
        TokensReply(R, 1, 0, [5]),
        tokens(6, 7),
        TokensReply(R, 1, 1, [6, 7], named * 2),
    ]
    assert await reply_items(parts.redis, other) == [tokens(3, 9)]


async def _published(redis: Redis, gateway_id: GatewayId, count: int) -> bool:
    """So many tokens, or items of other kinds."""
    items = await reply_items(redis, gateway_id)
    return sum(len(item.tokens) if isinstance(item, TokensReply) else 1 for item in items) >= count


async def test_output_reaches_the_journal_within_a_second_and_names_its_place_in_the_replies(parts: Parts) -> None:
    async with running(parts):
        parts.publisher.publish(GATEWAY, tokens(0, 1, 2))
        await until(lambda: parts.redis.exists(keys.journal(CELL, R)), timeout_s=1.5)
    journal = await journal_of(parts.redis, R)
    [(entry_id, _)] = await parts.redis.xrange(keys.replies(CELL, GATEWAY))
    assert journal.output(0).tokens == [1, 2]
    assert journal.tail == entry_id


async def _pending_request(parts: Parts) -> PendingRequest:
    await ensure_groups(parts.redis, [keys.requests(CELL, lane) for lane in keys.LANES])
    entry = request_entry(R)
    entry_id = await submit(parts.redis, entry)
    await parts.redis.xreadgroup(
        keys.SCHEDULER_GROUP, keys.SCHEDULER_CONSUMER, {keys.requests(CELL, "interactive"): ">"}
    )
    request = PendingRequest(entry, "interactive", entry_id)
    parts.pending.add(request)
    return request


async def test_a_request_ends_in_one_terminal_reply_and_leaves_nothing_but_its_journal(parts: Parts) -> None:
    await _pending_request(parts)
    parts.publisher.publish(GATEWAY, tokens(0, 1, 2))
    parts.terminals.finish(TerminalReply(R))
    async with running(parts):
        await until(lambda: is_closed(parts.redis, R))
    assert (await reply_items(parts.redis))[-1] == TerminalReply(R)
    journal = await journal_of(parts.redis, R)
    assert journal.output(0).tokens == [1, 2] and journal.terminal == TerminalReply(R)
    assert parts.pending.all() == []


async def test_publishing_ends_when_another_scheduler_took_the_fence(parts: Parts) -> None:
    await _pending_request(parts)
    await parts.redis.delete(keys.lease(CELL))
    await Lease(parts.redis, CELL, "usurper").acquire()
    parts.terminals.finish(TerminalReply(R))
    with pytest.raises(FenceLost):
        await asyncio.wait_for(parts.publisher.run(), 5)
    assert await parts.redis.sismember(keys.live(CELL), R)


async def test_replies_wait_for_a_redis_that_is_away_and_come_in_order(parts: Parts, redis_server: RedisServer) -> None:
    await _pending_request(parts)
    async with running(parts):
        parts.publisher.publish(GATEWAY, tokens(0, 1))
        await until(lambda: _published(parts.redis, GATEWAY, 1))
        redis_server.kill()
        for position in range(1, 40):
            parts.publisher.publish(GATEWAY, tokens(position, position))
            await asyncio.sleep(0)
        redis_server.start()
        async with open_redis(redis_server.url) as redis:
            await until(lambda: _published(redis, GATEWAY, 40))
            replies_of = [item for item in await reply_items(redis) if isinstance(item, TokensReply)]
            positions = [item.position + i for item in replies_of for i in range(len(item.tokens))]
            live = await redis.smembers(keys.live(CELL))
    assert positions == list(range(40)), "what was sent before comes again first, and nothing is missing"
    assert live == {R.encode()}
    assert parts.metrics.redis_reconnects._value.get() > 0


async def test_a_restart_is_noticed_although_nothing_is_published(parts: Parts, redis_server: RedisServer) -> None:
    async with running(parts):
        parts.publisher.publish(GATEWAY, tokens(0, 1))
        await until(lambda: _published(parts.redis, GATEWAY, 1))
        redis_server.kill()
        redis_server.start()
        async with open_redis(redis_server.url) as redis:
            await until(lambda: _published(redis, GATEWAY, 1))


async def test_a_full_buffer_makes_the_service_wait(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher_module, "MAX_BUFFERED", 3)
    for position in range(3):
        parts.publisher.publish(GATEWAY, tokens(position, 1))
    waiting = asyncio.create_task(parts.publisher.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    async with running(parts):
        await asyncio.wait_for(waiting, 5)
        await until(lambda: _published(parts.redis, GATEWAY, 3))


async def test_flush_gives_up_when_redis_is_away(parts: Parts, redis_server: RedisServer) -> None:
    redis_server.kill()
    parts.publisher.publish(GATEWAY, tokens(0, 1))
    await asyncio.wait_for(parts.publisher.flush(1.0), 2)


async def test_one_reply_stream_of_another_type_costs_its_gateway_only(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    evil = GatewayId("evil")
    await _pending_request(parts)
    await parts.redis.set(keys.replies(CELL, evil), "x")
    async with running(parts):
        for position in range(2):
            parts.publisher.publish(evil, TokensReply(RequestId("e"), 0, position, [9]))
            parts.publisher.publish(GATEWAY, tokens(position, position))
            await until(lambda position=position: _published(parts.redis, GATEWAY, position + 1))  # type: ignore[misc]
        parts.terminals.finish(TerminalReply(R))
        await until(lambda: is_closed(parts.redis, R))
    assert caplog.text.count("Redis refuses {test}:replies:evil") == 1


async def test_a_request_whose_reply_stream_is_refused_is_closed_with_all_its_output_in_the_journal(
    parts: Parts,
) -> None:
    await _pending_request(parts)
    parts.publisher.publish(GATEWAY, tokens(0, 1))
    await parts.publisher.flush(5)
    await parts.redis.rename(keys.replies(CELL, GATEWAY), "aside")
    await parts.redis.set(keys.replies(CELL, GATEWAY), "x")
    parts.publisher.publish(GATEWAY, tokens(1, 2))
    await parts.publisher.flush(5)
    await parts.redis.delete(keys.replies(CELL, GATEWAY))
    parts.publisher.publish(GATEWAY, tokens(2, 3))
    parts.terminals.finish(TerminalReply(R))
    await parts.publisher.flush(5)
    assert await is_closed(parts.redis, R)
    assert (await journal_of(parts.redis, R)).output(0).tokens == [1, 2, 3]


async def test_a_request_with_a_journal_of_another_type_is_removed_and_blocks_no_other(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    evil, lane = request_entry("evil"), keys.requests(CELL, "interactive")
    evil_id = await submit(parts.redis, evil)
    parts.pending.add(PendingRequest(evil, "interactive", evil_id))
    await parts.redis.set(keys.journal(CELL, evil.request_id), "x")
    await _pending_request(parts)
    async with running(parts):
        for request_id in (evil.request_id, R):
            parts.publisher.publish(GATEWAY, TokensReply(request_id, 0, 0, [7] * 16))  # journaled at once
        await until(lambda: parts.redis.hexists(keys.journal(CELL, R), "tail"))
        parts.terminals.finish(TerminalReply(evil.request_id))
        parts.terminals.finish(TerminalReply(R))
        await until(lambda: is_closed(parts.redis, R))
    assert await parts.redis.xlen(lane) == 0 and await parts.redis.scard(keys.live(CELL)) == 0
    assert await parts.redis.get(keys.journal(CELL, evil.request_id)) == b"x"
    assert caplog.text.count("Redis refuses") == 1


async def test_a_discard_that_redis_refuses_does_not_block_the_next(parts: Parts) -> None:
    lane = keys.requests(CELL, "interactive")
    await ensure_groups(parts.redis, [lane])
    await parts.redis.set(keys.requests(CELL, "batch"), "x")
    entry_id = await parts.redis.xadd(lane, {"v": b"0"})
    parts.publisher.discard("batch", b"1-0")
    parts.publisher.discard("interactive", entry_id)
    await parts.publisher.flush(1)
    assert await parts.redis.xlen(lane) == 0


@pytest.mark.parametrize(
    ("setting", "on", "off"), [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")], ids=["OOM", "NOREPLICAS"]
)
async def test_what_redis_refuses_for_its_own_state_is_tried_until_it_takes_it(
    parts: Parts, setting: str, on: str, off: str
) -> None:
    await _pending_request(parts)
    async with running(parts):
        parts.publisher.publish(GATEWAY, tokens(0, 1))
        await until(lambda: _published(parts.redis, GATEWAY, 1))
        await parts.redis.config_set(setting, on)
        await asyncio.sleep(1.2)  # the journal of the first token is due meanwhile
        parts.publisher.publish(GATEWAY, tokens(1, 2))
        parts.terminals.finish(TerminalReply(R))
        await asyncio.sleep(0.2)
        await parts.redis.config_set(setting, off)
        await until(lambda: is_closed(parts.redis, R))
    assert [i.tokens for i in await reply_items(parts.redis) if isinstance(i, TokensReply)] == [[1], [2]]
    assert (await journal_of(parts.redis, R)).output(0).tokens == [1, 2]


async def test_a_fence_of_another_type_is_a_lost_fence(parts: Parts) -> None:
    await _pending_request(parts)
    await parts.redis.delete(keys.fence(CELL))
    await parts.redis.lpush(keys.fence(CELL), "x")
    parts.terminals.finish(TerminalReply(R))
    with pytest.raises(FenceLost):
        await asyncio.wait_for(parts.publisher.run(), 5)
    assert await parts.redis.sismember(keys.live(CELL), R)
