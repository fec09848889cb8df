from __future__ import annotations

import asyncio

import pytest
from redis.exceptions import TimeoutError as RedisTimeoutError

from wire.errors import ConfigInvalid
from wire.redis_client import CONNECT_TIMEOUT_S, open_redis


async def test_a_command_can_be_cancelled_at_any_moment(redis_url: str) -> None:
    for cancel_after_ms in [i * 0.2 for i in range(25)]:
        async with open_redis(redis_url) as redis:

            async def keep_asking() -> None:
                while True:
                    await redis.ping()

            task = asyncio.create_task(keep_asking())
            await asyncio.sleep(cancel_after_ms / 1000)
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=2)
            assert done, f"cancelled after {cancel_after_ms} ms, it lives on"


async def test_a_server_that_does_not_answer_is_a_timeout_not_a_hang() -> None:
    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, open_redis(f"redis://127.0.0.1:{port}/0", command_timeout_s=0.1) as redis:
        with pytest.raises(RedisTimeoutError):
            await asyncio.wait_for(redis.ping(), CONNECT_TIMEOUT_S)


def test_another_scheme_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="PHASEMESH_REDIS_URL"):
        open_redis("http://127.0.0.1")
