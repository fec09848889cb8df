from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from scheduler.journal import FLUSH_AFTER_S, JournalDrafts, append_call, end_call
from scheduler.redis_io import ensure_groups
from tests.scheduler_service.parts import CELL, is_closed, journal_of, request_entry, submit
from wire import keys
from wire.entries import ChoiceReply, TerminalReply, TokensReply, pack_tokens
from wire.ids import Fence, RequestId
from wire.journal import Journal

R = RequestId("r")
FENCE = Fence(7)


def tokens(position: int, *ids: int, choice: int = 0) -> TokensReply:
    return TokensReply(R, choice, position, list(ids))


def test_a_draft_is_due_after_16_tokens_or_a_second() -> None:
    drafts = JournalDrafts()
    drafts.note(tokens(0, *range(15)), b"1-0", now=100.0)
    assert drafts.due(100.0 + FLUSH_AFTER_S / 2) == []
    assert drafts.next_due_s() == 100.0 + FLUSH_AFTER_S
    assert drafts.due(100.0 + FLUSH_AFTER_S) == [R]
    drafts.note(tokens(15, 15), b"2-0", now=100.1)
    assert drafts.due(100.1) == [R]
    drafts.written(R)
    assert drafts.due(200.0) == [] and drafts.next_due_s() is None


def test_of_many_drafts_the_full_and_the_old_are_due() -> None:
    drafts = JournalDrafts()
    for number in range(6):
        drafts.note(TokensReply(RequestId(f"r{number}"), 0, 0, [1]), b"1-0", now=100.0 + number / 10)
    drafts.note(TokensReply(RequestId("r4"), 0, 1, list(range(15))), b"2-0", now=100.6)
    assert sorted(drafts.due(101.15)) == ["r0", "r1", "r4"]
    for request_id in ("r0", "r4"):
        drafts.written(RequestId(request_id))
    drafts.note(TokensReply(RequestId("r0"), 0, 1, [2]), b"3-0", now=101.2)  # anew, so the youngest
    assert drafts.due(101.25) == ["r1", "r2"]
    assert drafts.next_due_s() == 100.1 + FLUSH_AFTER_S


def test_drafts_of_several_flushes_read_back_as_one_output() -> None:
    drafts = JournalDrafts()
    stored: dict[bytes, bytes] = {}

    def flush() -> None:
        for name, value in drafts.fields(R).items():
            stored[name.encode()] = value if isinstance(value, bytes) else str(value).encode()
        drafts.written(R)

    drafts.note(tokens(0, 1, 2), b"1-0", 0.0)
    drafts.note(tokens(2, 3), b"2-0", 0.0)
    flush()
    drafts.note(tokens(3, 4), b"3-0", 0.0)
    drafts.note(tokens(0, 9, choice=1), b"3-0", 0.0)
    drafts.note(ChoiceReply(R, 0, 4, "stop"), b"4-0", 0.0)
    flush()

    journal = Journal.decode(stored)
    assert journal.output(0).tokens == [1, 2, 3, 4]
    assert journal.output(0).is_whole and journal.output(0).finish_reason == "stop"
    assert journal.output(1).tokens == [9] and not journal.output(1).is_whole
    assert journal.tail == b"4-0" and journal.terminal is None


def test_a_journal_is_read_up_to_its_first_gap_and_overlaps_are_harmless() -> None:
    journal = Journal.decode(
        {
            b"gw": b"someone",
            b"o:0:10": pack_tokens([99]),
            b"o:0:2": pack_tokens([3, 4]),
            b"o:0:0": pack_tokens([1, 2, 3]),
            b"f:0": b"11:length",
        }
    )
    assert journal.output(0).tokens == [1, 2, 3, 4]
    assert not journal.output(0).is_whole


async def run(redis: Redis, call: list[Any]) -> int:
    return int(await redis.eval(*call))


async def test_scripts_of_a_fenced_out_scheduler_change_nothing(redis: Redis) -> None:
    await redis.set(keys.fence(CELL), FENCE + 1)
    entry_id = await submit(redis, request_entry(R))
    before = await redis.hgetall(keys.journal(CELL, R))
    assert await run(redis, append_call(CELL, FENCE, R, {"o:0:0": b"1234"})) == 0
    assert await run(redis, end_call(CELL, FENCE, "interactive", entry_id, TerminalReply(R), {})) == 0
    assert await redis.hgetall(keys.journal(CELL, R)) == before
    assert await redis.sismember(keys.live(CELL), R)
    assert await redis.xlen(keys.requests(CELL, "interactive")) == 1


async def test_the_end_of_a_request_is_written_once_however_often_it_is_run(redis: Redis) -> None:
    await redis.set(keys.fence(CELL), FENCE)
    lanes = [keys.requests(CELL, lane) for lane in keys.LANES]
    await ensure_groups(redis, lanes)
    entry_id = await submit(redis, request_entry(R))
    await redis.xreadgroup(keys.SCHEDULER_GROUP, keys.SCHEDULER_CONSUMER, {lanes[0]: ">"})
    call = end_call(CELL, FENCE, "interactive", entry_id, TerminalReply(R), {"o:0:0": pack_tokens([4, 5])})
    for _ in range(2):
        assert await run(redis, call) == 1
        assert await is_closed(redis, R)
    journal = await journal_of(redis, R)
    assert journal.terminal == TerminalReply(R)
    assert journal.output(0).tokens == [4, 5]
