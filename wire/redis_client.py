"""The Redis client of every service: fails at once, answers within a bound, and can be cancelled at any await."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from redis.asyncio import Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import AbstractConnection, UnixDomainSocketConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from wire.errors import ConfigInvalid

COMMAND_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0

ConnectHook = Callable[[AbstractConnection], Awaitable[None]]


class _Cancellable(AbstractConnection):
    """redis-py sends under asyncio.wait_for, which before Python 3.12 loses a cancellation that comes just when
    the send completes (python/cpython#86296): the cancelled task then lives on. asyncio.timeout does not."""

    async def send_packed_command(self, command: bytes | str | Iterable[bytes], check_health: bool = True) -> None:
        if not self.is_connected:
            await self.connect_check_health(check_health=False)
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


_CONNECTIONS: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _TcpConnection,
    SSLConnection: _TlsConnection,
    UnixDomainSocketConnection: _UnixConnection,
}


def open_redis(
    url: str,
    *,
    command_timeout_s: float = COMMAND_TIMEOUT_S,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
    on_connect: ConnectHook | None = None,
) -> Redis:
    """A client that connects on its first command, gives bytes back, and never retries by itself: its user must
    see that a connection was lost. Raises ConfigInvalid for what is not a redis://, rediss:// or unix:// URL.

    on_connect replaces the connection's own greeting and must call it.
    """
    try:
        location = parse_url(url)
    except ValueError as error:
        raise ConfigInvalid(f"PHASEMESH_REDIS_URL={url!r}: {error}", param="PHASEMESH_REDIS_URL") from error
    options: dict[str, Any] = {
        "connection_class": Connection,
        "protocol": 2,
        "decode_responses": False,
        "socket_timeout": command_timeout_s,
        "socket_connect_timeout": connect_timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "redis_connect_func": on_connect,
        **location,
    }
    options["connection_class"] = _CONNECTIONS[options["connection_class"]]
    return Redis.from_pool(ConnectionPool(**options))
