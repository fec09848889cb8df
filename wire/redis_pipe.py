"""Commands of one task on one connection of its own, for the hop that every token takes.

redis-py's client takes a connection from its pool for each command or pipeline, looks whether it still lives, gives it
back, and tells its hooks of all that: more work than the command. Here is what is left when only one task asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

Argument: TypeAlias = bytes | str | int | float
Command: TypeAlias = Sequence[Argument]


class RedisPipe:
    """Takes a connection of `redis` at its first command and keeps it; `redis.aclose()` closes it."""

    def __init__(self, redis: Redis) -> None:
        self._pool = redis.connection_pool
        self._connection: AbstractConnection | None = None
        self._timeout_s: float | None = None

    @property
    def is_open(self) -> bool:
        """It has a connection, which may have broken since it was used."""
        return self._connection is not None and self._connection.is_connected

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Send all at once; the raw answers in order, a ResponseError where Redis refused one.

        Raises redis-py's other errors: then any part of it may be done or not, and the next call connects anew. The
        client's bound on a command bounds them all together.
        """
        if not commands:
            return []
        connection = self._connection or await self._connect()
        packed = [hiredis.pack_command(tuple(command)) for command in commands]  # type: ignore[arg-type]  # one of one
        answers: list[Any] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.send_packed_command(packed)
                for _ in commands:
                    try:
                        answers.append(await connection.read_response())
                    except ResponseError as error:
                        answers.append(error)
        except BaseException as error:
            await connection.disconnect(nowait=True)  # answers that are still to come belong to nobody
            if isinstance(error, TimeoutError):
                raise RedisTimeoutError(f"no answer within {self._timeout_s} s") from error
            raise
        return answers

    async def _connect(self) -> AbstractConnection:
        connection: AbstractConnection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        # One bound for all, not one for each part.
        self._timeout_s, connection.socket_timeout = connection.socket_timeout, None
        self._connection = connection
        return connection

    async def ask(self, command: Command) -> Any:
        """One command's raw answer. Raises redis-py's errors, ResponseError too."""
        [answer] = await self.execute([command])
        if isinstance(answer, ResponseError):
            raise answer
        return answer

    async def run_id(self) -> bytes:
        """Of the server: a restarted one has another."""
        return run_id_of(await self.ask(("INFO", "server")))


def run_id_of(info: bytes) -> bytes:
    """From the answer to INFO server; empty when it does not say."""
    return next((line for line in info.splitlines() if line.startswith(b"run_id:")), b"")


def xadd(stream: str, fields: Mapping[str, Argument], *, max_entries: int | None = None) -> Command:
    """Add an entry; the stream is cut to about max_entries."""
    cut: Command = () if max_entries is None else ("MAXLEN", "~", max_entries)
    return ["XADD", stream, *cut, "*", *(part for field in fields.items() for part in field)]


def stream_entries(raw: Iterable[tuple[bytes, Sequence[bytes]]]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Ids and fields of what XREAD or XRANGE answered for one stream."""
    return [(entry_id, dict(zip(parts[::2], parts[1::2], strict=True))) for entry_id, parts in raw]
