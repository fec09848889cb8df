"""Where to connect when the URL does not say: the master that Sentinels watch, or the Cluster node with a cell's slot.

Everything of a cell lies on one slot, so on one node at a time, and an ordinary client of that node is all that a
service needs. Each new connection asks anew where that is. An answer that says "no longer here" ends the connection, as
if the server had died: its user tries again, and is told the new place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from redis.asyncio.connection import AbstractConnection, Connection
from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, ReadOnlyError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError

from wire.redis_url import Address

_NOT_HERE = (ReadOnlyError, AskError, TryAgainError, ClusterDownError)
"""MOVED is an AskError to redis-py. While a slot goes from node to node, it answers ASK or TRYAGAIN."""

Connect: TypeAlias = Callable[[Address], AbstractConnection]


class Locator(Protocol):
    async def locate(self) -> Address:
        """Where to connect now. Raises redis-py's ConnectionError when nobody knows."""
        ...


class LocatedConnection(Connection):
    """Asks its locator for host and port whenever it connects. Mixed into a connection class."""

    def __init__(self, *, locator: Locator, **options: Any) -> None:
        self._locator = locator
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await self._locator.locate()
        await super()._connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except _NOT_HERE as error:
            await self.disconnect()
            raise RedisConnectionError(f"{self.host}:{self.port} is not the place any more: {error}") from error


class _AskingLocator(ABC):
    """Asks its nodes in turn, the one that knew last time first."""

    def __init__(self, wanted: str, nodes: Sequence[Address], connect: Connect) -> None:
        self._wanted = wanted
        self._nodes = list(nodes)
        self._connect = connect

    async def locate(self) -> Address:
        failures = []
        for node in list(self._nodes):
            connection = self._connect(node)
            try:
                await connection.connect()  # type: ignore[no-untyped-call]
                address = await self._ask(connection, node)
            except (RedisError, OSError) as error:
                failures.append(f"{node[0]}:{node[1]}: {error}")
                continue
            finally:
                await connection.disconnect(nowait=True)
            if address is not None:
                self._nodes.remove(node)
                self._nodes.insert(0, node)
                return address
            failures.append(f"{node[0]}:{node[1]} does not know")
        raise RedisConnectionError(f"{self._wanted} not found: {'; '.join(failures)}")

    @abstractmethod
    async def _ask(self, connection: AbstractConnection, node: Address) -> Address | None:
        """None: this node does not know. Raises redis-py's errors."""


class SentinelLocator(_AskingLocator):
    """The master of a service. connect makes a connection to a Sentinel, not yet opened."""

    def __init__(self, sentinels: Sequence[Address], service: str, connect: Connect) -> None:
        super().__init__(f"master of {service!r}", sentinels, connect)
        self._service = service

    async def _ask(self, connection: AbstractConnection, node: Address) -> Address | None:
        await connection.send_command("SENTINEL", "get-master-addr-by-name", self._service)
        answer: Any = await connection.read_response()
        return None if answer is None else (answer[0].decode(), int(answer[1]))


class ClusterLocator(_AskingLocator):
    """The master that has a cell's slot. connect makes a connection to any node, not yet opened."""

    def __init__(self, nodes: Sequence[Address], cell: str, connect: Connect) -> None:
        self._slot = key_slot(f"{{{cell}}}".encode())
        super().__init__(f"node with slot {self._slot} of cell {cell!r}", nodes, connect)

    async def _ask(self, connection: AbstractConnection, node: Address) -> Address | None:
        await connection.send_command("CLUSTER", "SLOTS")
        ranges: Any = await connection.read_response()
        masters = {(first, last): (host.decode() or node[0], port) for first, last, (host, port, *_), *_ in ranges}
        self._nodes += [master for master in masters.values() if master not in self._nodes]  # for when the first dies
        return next((master for (first, last), master in masters.items() if first <= self._slot <= last), None)
