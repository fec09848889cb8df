from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import SSLConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.redis_fixture import free_port, silent_server
from wire.errors import ConfigInvalid
from wire.redis_client import CONNECT_TIMEOUT_S, open_redis
from wire.redis_url import parse_redis_url


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
    async with silent_server() as url, open_redis(url, command_timeout_s=0.1) as redis:
        with pytest.raises(RedisTimeoutError):
            await asyncio.wait_for(redis.ping(), CONNECT_TIMEOUT_S)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1", "scheme"),
        ("http+cluster://127.0.0.1", "scheme is redis"),
        ("redis+proxy://127.0.0.1", "scheme is redis"),
        ("redis+sentinel://127.0.0.1:26379", "names the service"),
        ("redis+sentinel://127.0.0.1:26379/mesh/one", "database number"),
        ("redis+sentinel://127.0.0.1:26379/mesh/0/1", "database number"),
        ("redis+sentinel://127.0.0.1:port/mesh", "port is a number"),
        ("redis+sentinel://127.0.0.1:70000/mesh", "port is a number"),
        ("redis+sentinel://a,,b/mesh", "no host name"),
        ("redis+cluster://127.0.0.1:7000/1", "database 0 only"),
    ],
)
def test_a_url_that_says_nothing_is_refused_by_name(url: str, says: str) -> None:
    with pytest.raises(ConfigInvalid, match=says) as refused:
        open_redis(url, cell="c")
    assert refused.value.message.startswith("PHASEMESH_REDIS_URL=")


def test_a_refusal_keeps_the_password_to_itself() -> None:
    with pytest.raises(ConfigInvalid) as refused:
        open_redis("redis+cluster://user:hunter2@127.0.0.1:7000/1?sentinel_password=hunter3", cell="c")
    assert "hunter" not in refused.value.message


def test_a_cluster_without_a_cell_is_refused() -> None:
    with pytest.raises(ConfigInvalid, match="a Cluster is asked for a cell only"):
        open_redis("redis+cluster://127.0.0.1:7000")


def test_what_a_url_of_several_nodes_says() -> None:
    url = parse_redis_url(
        "rediss+sentinel://us%40er:p%2Fw@one:1,two,[::1]:3,[::2]/mesh/4?ssl_cert_reqs=none&sentinel_password=s"
    )
    assert url.nodes == (("one", 1), ("two", 26379), ("::1", 3), ("::2", 26379))
    assert url.service == "mesh"
    assert url.sentinel_options == {"password": "s"}
    assert url.options == {
        "connection_class": SSLConnection,
        "username": "us@er",
        "password": "p/w",
        "db": 4,
        "ssl_cert_reqs": "none",
    }
    assert parse_redis_url("redis+cluster://one").nodes == (("one", 6379),)


async def test_nobody_who_knows_is_a_lost_connection_that_names_them_all() -> None:
    ports = [free_port(), free_port()]
    nodes = ",".join(f"127.0.0.1:{port}" for port in ports)
    for url, wanted in ((f"redis+sentinel://{nodes}/mesh", "master of 'mesh'"), (f"redis+cluster://{nodes}", "slot")):
        async with open_redis(url, cell="c") as redis:
            with pytest.raises(RedisConnectionError, match=f"{wanted}.*{ports[0]}.*{ports[1]}"):
                await redis.ping()


async def test_a_server_that_is_no_cluster_does_not_know(redis_url: str) -> None:
    async with open_redis(redis_url.replace("redis://", "redis+cluster://"), cell="c") as redis:
        with pytest.raises(RedisConnectionError, match="cluster support disabled"):
            await redis.ping()
