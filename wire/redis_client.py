"""The Redis client of every service: fails at once, answers within a bound, and can be cancelled at any await."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import AbstractConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from wire.errors import ConfigInvalid
from wire.redis_location import ClusterLocator, LocatedConnection, Locator, SentinelLocator
from wire.redis_url import Address, RedisUrl, Topology, parse_redis_url

COMMAND_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0

ConnectHook = Callable[[AbstractConnection], Awaitable[None]]


class _Cancellable(AbstractConnection):
    """redis-py sends under asyncio.wait_for, which before Python 3.12 loses a cancellation that comes just when
    the send completes (python/cpython#86296): the cancelled task then lives on. asyncio.timeout does not."""

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
        if self.socket_timeout is None:
            return await super().send_packed_command(command, check_health)
        timeout_s, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(timeout_s):
                await super().send_packed_command(command, check_health)
        finally:
            self.socket_timeout = timeout_s


class _TcpConnection(_Cancellable, Connection):
    pass


class _TlsConnection(_Cancellable, SSLConnection):
    pass


class _UnixConnection(_Cancellable, UnixDomainSocketConnection):
    pass


class _LocatedTcpConnection(LocatedConnection, _TcpConnection):
    pass


class _LocatedTlsConnection(LocatedConnection, _TlsConnection):
    pass


_CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _TcpConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _UnixConnection,
}
_LOCATED: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _LocatedTcpConnection,
    SSLConnection: _LocatedTlsConnection,
}


def open_redis(
    url: str,
    *,
    cell: str | None = None,
    command_timeout_s: float = COMMAND_TIMEOUT_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    on_connect: ConnectHook | None = None,
) -> Redis:
    """A client that connects on its first command, gives bytes back, and never retries by itself: its user must
    see that a connection was lost. Raises ConfigInvalid for what wire.redis_url does not take.

    cell: whose keys are meant, needed on a Cluster: the client is connected to the node that has them, and to no other.
    on_connect replaces the connection's own greeting and must call it.
    """
    location = parse_redis_url(url)
    options: dict[str, Any] = {
        "connection_class": Connection,
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": command_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        **location.options,
    }
    kind = options.pop("connection_class")
    if location.topology is not Topology.SERVER:
        options["locator"] = _locator(location, cell, kind, options)
        kind = _LOCATED[kind]
    else:
        kind = _CONNECTIONS[kind]
    return Redis.from_pool(ConnectionPool(connection_class=kind, redis_connect_func=on_connect, **options))


def _locator(url: RedisUrl, cell: str | None, kind: type[AbstractConnection], options: dict[str, Any]) -> Locator:
    asked = dict(options)
    if url.topology is Topology.SENTINEL:  # no database there, and users of their own
        asked = {name: v for name, v in options.items() if name not in ("db", "username", "password")}
        asked |= url.sentinel_options

    def connect(node: Address) -> AbstractConnection:
        host, port = node
        return _CONNECTIONS[kind](host=host, port=port, **asked)  # type: ignore[call-arg]  # both kinds have hosts

    if url.topology is Topology.SENTINEL:
        return SentinelLocator(url.nodes, url.service, connect)
    if cell is None:
        raise ConfigInvalid("PHASEMESH_REDIS_URL: a Cluster is asked for a cell only", param="PHASEMESH_REDIS_URL")
    return ClusterLocator(url.nodes, cell, connect)
