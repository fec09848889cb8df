from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.redis_fixture import silent_server
from wire.redis_client import CONNECT_TIMEOUT_S, open_redis
from wire.redis_pipe import RedisPipe, stream_entries, xadd


async def test_answers_come_in_order_and_a_refused_command_is_one_of_them(redis_url: str) -> None:
    async with open_redis(redis_url) as redis:
        pipe = RedisPipe(redis)
        await pipe.execute([("SET", "text", b"\x00\xff")])
        set_, refused, got, none = await pipe.execute(
            [("SET", "n", 7), ("LPUSH", "n", "x"), ("GET", "text"), ("GET", "absent")]
        )
        assert (set_, got, none) == (b"OK", b"\x00\xff", None)
        assert isinstance(refused, ResponseError)
        with pytest.raises(ResponseError, match="WRONGTYPE"):
            await pipe.ask(("LPUSH", "n", "x"))
        assert await pipe.ask(("GET", "n")) == b"7"
        assert await pipe.execute([]) == []


async def test_stream_entries_are_read_as_they_were_written_and_old_ones_are_cut(redis_url: str) -> None:
    async with open_redis(redis_url) as redis:
        pipe = RedisPipe(redis)
        ids = await pipe.execute([xadd("s", {"n": n, "body": b"\r\n"}, max_entries=10) for n in range(1000)])
        [[name, raw]] = await pipe.ask(("XREAD", "STREAMS", "s", ids[-3]))
        assert name == b"s"
        assert stream_entries(raw) == [(ids[n], {b"n": str(n).encode(), b"body": b"\r\n"}) for n in (998, 999)]
        assert await pipe.ask(("XLEN", "s")) < 1000
        await pipe.execute([xadd("whole", {"n": n}) for n in range(1000)])
        assert await pipe.ask(("XLEN", "whole")) == 1000


async def test_cancelled_at_any_moment_the_next_answers_are_its_own(redis_url: str) -> None:
    async with open_redis(redis_url) as redis:
        pipe = RedisPipe(redis)
        for cancel_after_ms in [i * 0.1 for i in range(25)]:

            async def keep_asking() -> None:
                for n in range(1_000_000):
                    assert await pipe.execute([("ECHO", n), ("ECHO", -n)]) == [b"%d" % n, b"%d" % -n]

            task = asyncio.create_task(keep_asking())
            await asyncio.sleep(cancel_after_ms / 1000)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=2)
            assert done, f"cancelled after {cancel_after_ms} ms, it lives on"
            assert task.cancelled()
            assert await pipe.ask(("ECHO", "mine")) == b"mine"


async def test_a_late_answer_is_nobodys(redis_url: str) -> None:
    async with open_redis(redis_url, command_timeout_s=0.1) as redis:
        pipe = RedisPipe(redis)
        with pytest.raises(RedisTimeoutError, match=r"0\.1 s"):
            await pipe.execute([("ECHO", "early"), ("BLPOP", "empty", "0.3")])
        assert await pipe.ask(("ECHO", "next")) == b"next"


async def test_a_server_that_does_not_answer_is_a_timeout_not_a_hang() -> None:
    async with silent_server() as url, open_redis(url, command_timeout_s=0.1) as redis:
        with pytest.raises(RedisTimeoutError):
            await asyncio.wait_for(RedisPipe(redis).execute([("PING",)]), CONNECT_TIMEOUT_S)


async def test_a_lost_connection_fails_one_call_and_the_next_connects_anew(redis_url: str) -> None:
    async with open_redis(redis_url) as redis, open_redis(redis_url) as other:
        pipe = RedisPipe(redis)
        own = await pipe.ask(("CLIENT", "ID"))
        await other.client_kill_filter(_id=str(own))
        with pytest.raises(RedisConnectionError):
            await pipe.ask(("PING",))
        assert await pipe.ask(("PING",)) == b"PONG"
        assert await pipe.ask(("CLIENT", "ID")) != own


async def test_a_server_has_one_run_id(redis_url: str) -> None:
    async with open_redis(redis_url) as redis, open_redis("redis://127.0.0.1:1/0") as absent:
        assert await RedisPipe(redis).run_id() == b"run_id:" + (await redis.info("server"))["run_id"].encode()
        with pytest.raises(RedisError):
            await RedisPipe(absent).run_id()
