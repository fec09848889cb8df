from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvstore.prefix_hash import namespace, root_hash
from scheduler.events import CancelRequested, RequestArrived
from scheduler.intake import ControlIntake, RequestIntake
from scheduler.pending import PendingRequest
from scheduler.redis_io import ensure_groups
from tests.engine.paged_worker import CARD, VOCAB
from tests.redis_fixture import RedisServer
from tests.scheduler_service.parts import CELL, Parts, is_closed, reply_items, request_entry, submit, until
from wire import keys
from wire.entries import CancelEntry, TerminalReply
from wire.ids import RequestId
from wire.redis_client import open_redis
from wire.sampling import SamplingParams


@asynccontextmanager
async def reading(parts: Parts) -> AsyncIterator[None]:
    """Intakes and publisher at work."""
    await ensure_groups(parts.redis, [keys.requests(CELL, lane) for lane in keys.LANES])
    async with open_redis(parts.url) as requests_redis, open_redis(parts.url) as control_redis:
        jobs = (
            RequestIntake(requests_redis, CELL, parts.arrivals, parts.publisher).run(),
            ControlIntake(control_redis, CELL, parts.inbox).run(),
            parts.publisher.run(),
            parts.arrivals.expire(),
        )
        tasks = [asyncio.create_task(job) for job in jobs]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


async def next_arrival(parts: Parts) -> RequestArrived:
    event = await asyncio.wait_for(parts.inbox.get(), 5)
    assert isinstance(event, RequestArrived)
    return event


async def test_a_request_reaches_the_engine_with_its_cache_root_and_stays_pending(parts: Parts) -> None:
    await parts.know_model()
    async with reading(parts):
        entry = request_entry("r", salt="tenant-a", tenant="a", priority=3, deadline_unix_s=1e12, num_choices=2)
        await submit(parts.redis, entry, "batch")
        request = (await next_arrival(parts)).request
    assert request.root_hash == root_hash(namespace(CARD), "tenant-a")
    assert (request.prompt, request.sampling, request.num_choices) == (entry.prompt, entry.sampling, 2)
    assert (request.tenant, request.priority, request.deadline_s) == ("a", 3, 1e12)
    pending: Any = await parts.redis.xpending(keys.requests(CELL, "batch"), keys.SCHEDULER_GROUP)
    assert pending["pending"] == 1


async def test_the_interactive_lane_is_drained_before_the_batch_lane(parts: Parts) -> None:
    await parts.know_model()
    for i in range(3):
        await submit(parts.redis, request_entry(f"batch-{i}"), "batch")
        await submit(parts.redis, request_entry(f"interactive-{i}"))
    async with reading(parts):
        order = [(await next_arrival(parts)).request.request_id for _ in range(6)]
    assert order == [f"{lane}-{i}" for lane in ("interactive", "batch") for i in range(3)]


async def test_a_malformed_request_gets_a_terminal_and_is_removed(parts: Parts) -> None:
    fields: Any = request_entry("bad").encode()
    stream = keys.requests(CELL, "interactive")
    await parts.redis.sadd(keys.live(CELL), "bad")
    await parts.redis.xadd(stream, {**fields, "prompt": b"odd"})
    async with reading(parts):
        await until(lambda: is_closed(parts.redis, "bad"))
    [terminal] = await reply_items(parts.redis)
    assert isinstance(terminal, TerminalReply) and terminal.error_code == "entry_malformed"


async def test_an_entry_nobody_can_be_answered_for_is_removed_and_the_next_is_served(parts: Parts) -> None:
    await parts.know_model()
    stream = keys.requests(CELL, "interactive")
    hostile: list[dict[str, bytes]] = [{"x": b"y"}, {"v": b"1", "body": b"[]"}, {"v": b"9", "body": b'{"id": 7}'}]
    for fields in hostile:
        await parts.redis.xadd(stream, fields)
    await submit(parts.redis, request_entry("good"))

    async def only_the_good_one_is_left() -> bool:
        return bool(await parts.redis.xlen(stream) == 1)

    async with reading(parts):
        assert (await next_arrival(parts)).request.request_id == "good"
        await until(only_the_good_one_is_left)


async def test_what_would_fail_a_worker_is_refused_here(parts: Parts) -> None:
    await parts.know_model()
    async with reading(parts):
        await submit(parts.redis, request_entry("bad", [1, VOCAB]))
        await until(lambda: is_closed(parts.redis, "bad"))
    [terminal] = await reply_items(parts.redis)
    assert isinstance(terminal, TerminalReply) and terminal.error_code == "invalid_request"


async def test_sampling_that_no_plan_can_carry_is_refused_here(parts: Parts) -> None:
    await parts.know_model()
    sampling = SamplingParams(max_tokens=1, seed=2**70)  # decoding refuses it first
    await parts.arrivals.accept(PendingRequest(request_entry("r", sampling=sampling), "interactive", b"1-0"))
    await parts.publisher.flush(5)
    [terminal] = await reply_items(parts.redis)
    assert isinstance(terminal, TerminalReply) and terminal.error_code == "invalid_request"
    assert parts.events() == [] and parts.pending.all() == []


async def test_without_a_worker_a_request_waits_and_then_ends_in_unavailable(parts: Parts) -> None:
    async with reading(parts):
        await submit(parts.redis, request_entry("r"))
        await until(lambda: is_closed(parts.redis, "r"))
    [terminal] = await reply_items(parts.redis)
    assert isinstance(terminal, TerminalReply)
    assert terminal.error_code == "unavailable" and terminal.retry_after_s
    assert parts.events() == []


async def test_a_worker_that_comes_in_time_gets_what_was_held(parts: Parts) -> None:
    async with reading(parts):
        await submit(parts.redis, request_entry("r"))

        async def is_held() -> bool:
            return len(parts.pending.all()) == 1

        await until(is_held)
        await parts.know_model()
        assert (await next_arrival(parts)).request.request_id == "r"


async def test_a_request_added_twice_arrives_once_and_both_entries_go(parts: Parts) -> None:
    await parts.know_model()
    async with reading(parts):
        await submit(parts.redis, request_entry("r"))
        await next_arrival(parts)
        await submit(parts.redis, request_entry("r"))
        await submit(parts.redis, request_entry("last"))
        assert (await next_arrival(parts)).request.request_id == "last"
        parts.terminals.finish(TerminalReply(RequestId("r")))
        parts.terminals.finish(TerminalReply(RequestId("last")))
        await until(lambda: is_closed(parts.redis, "r"))


async def test_cancels_reach_the_engine_and_are_removed(parts: Parts) -> None:
    fields: Any = CancelEntry(RequestId("early"), "disconnect").encode()
    await parts.redis.xadd(keys.control(CELL), fields)
    await parts.redis.xadd(keys.control(CELL), {"v": b"1", "body": b"nonsense"})
    async with reading(parts):
        assert await asyncio.wait_for(parts.inbox.get(), 5) == CancelRequested(RequestId("early"), "disconnect")
        fields = CancelEntry(RequestId("r"), "stop", choice=1).encode()
        await parts.redis.xadd(keys.control(CELL), fields)
        assert await asyncio.wait_for(parts.inbox.get(), 5) == CancelRequested(RequestId("r"), "stop", 1)

        async def is_empty() -> bool:
            return bool(await parts.redis.xlen(keys.control(CELL)) == 0)

        await until(is_empty)


async def test_reading_goes_on_after_redis_was_killed_and_lost_its_groups(
    parts: Parts, redis_server: RedisServer
) -> None:
    await parts.know_model()
    async with reading(parts):
        await submit(parts.redis, request_entry("before"))
        await next_arrival(parts)
        redis_server.kill()
        await asyncio.sleep(0.1)
        redis_server.start()
        async with open_redis(redis_server.url) as redis:
            await submit(redis, request_entry("after"))
            assert (await next_arrival(parts)).request.request_id == "after"
            fields: Any = CancelEntry(RequestId("after"), "disconnect").encode()
            await redis.xadd(keys.control(CELL), fields)
            assert isinstance(await asyncio.wait_for(parts.inbox.get(), 5), CancelRequested)
