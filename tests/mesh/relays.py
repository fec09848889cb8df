"""Hosts as loopback addresses, for machines without namespaces, and for slow links, which not every kernel can make.

    client ──▸ relay: whose process is it? ──▸ link (its host, the service's host) ──▸ service

Every service is reached through a relay of the test process, which knows by the client's process which link a
connection crosses, and holds back what crosses it while that is cut: no RST, no FIN, and what was sent arrives after
the heal, as TCP would send it again. What a real network does otherwise: a connection that is opened during a cut is
accepted at once, and hears nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import psutil

from tests.mesh.network import Network
from tests.redis_fixture import free_port

_READ_BYTES = 1 << 16
_MAX_CHUNKS = 64
"""In one direction of a connection; more → the sender waits, as for a full send buffer."""
_START_TIMEOUT_S = 10.0


class _Link:
    """One direction between two hosts. For the relays' loop only."""

    def __init__(self) -> None:
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self._free_at_s = 0.0  # the last byte that was let in has left

    async def pass_through(self, num_bytes: int, sent_s: float) -> None:
        """Wait until bytes that were sent at `sent_s` (the loop's time) come out at the other end."""
        await self.is_open.wait()
        arrives_s = sent_s + self.delay_s
        if self.bytes_per_s is not None:
            self._free_at_s = max(self._free_at_s, sent_s) + num_bytes / self.bytes_per_s
            arrives_s = self._free_at_s + self.delay_s
        await asyncio.sleep(max(0.0, arrives_s - asyncio.get_running_loop().time()))
        await self.is_open.wait()


class LoopbackNetwork(Network):
    """`with LoopbackNetwork(["a", "b"]) as network: …`"""

    way = "loopback"

    def __init__(self, hosts: Sequence[str]) -> None:
        super().__init__(hosts)
        self._links = {(a, b): _Link() for a in hosts for b in hosts if a != b}
        self._free_link = _Link()  # inside a host, and from outside
        self._host_of: dict[int, str] = {}  # by pid
        self._relays: dict[tuple[str, int], str] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relays", daemon=True)

    # -- the network as its hosts see it ---------------------------------------------------------------------------

    def address(self, host: str) -> str:
        return f"127.0.0.{2 + self.hosts.index(host)}"

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def started(self, host: str, pid: int) -> None:
        self._host_of[pid] = host

    def reach(self, host: str, port: int) -> str:
        if (host, port) not in self._relays:
            self._relays[host, port] = self._do(self._listen(host, port))
        return self._relays[host, port]

    def cut(self, source: str, target: str) -> None:
        self._do(self._set_open(source, target, False))

    def mend(self, source: str, target: str) -> None:
        self._do(self._set_open(source, target, True))

    def slow_down(self, a: str, b: str, *, delay_s: float, bytes_per_s: float) -> None:
        """What crosses between two hosts takes so long, in both directions, for all their connections together."""
        for pair in ((a, b), (b, a)):
            self._links[pair].delay_s, self._links[pair].bytes_per_s = delay_s, bytes_per_s

    # -- made and unmade -------------------------------------------------------------------------------------------

    def __enter__(self) -> LoopbackNetwork:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_TIMEOUT_S)
        self._loop.close()

    def _do(self, job: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(_START_TIMEOUT_S)

    async def _set_open(self, source: str, target: str, is_open: bool) -> None:
        event = self._links[source, target].is_open
        if is_open:
            event.set()
        else:
            event.clear()

    async def _close(self) -> None:
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # -- relays ----------------------------------------------------------------------------------------------------

    async def _listen(self, host: str, port: int) -> str:
        address, relay_port = self.address(host), free_port()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
            with suppress(OSError, asyncio.CancelledError):  # either end is gone, or the network is
                await self._relay(reader, writer, host, port)

        self._servers.append(await asyncio.start_server(accepted, address, relay_port))
        return f"{address}:{relay_port}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
        source = await asyncio.to_thread(self._host_at, writer.get_extra_info("peername"))
        to_service, to_client = self._between(source, host), self._between(host, source)
        try:
            await to_service.pass_through(0, self._loop.time())
            service_reader, service_writer = await asyncio.open_connection(self.address(host), port)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(_pump(reader, service_writer, to_service))
                    both.create_task(_pump(service_reader, writer, to_client))
            except* OSError:
                pass  # one end is gone: so is the connection
            finally:
                service_writer.transport.abort()
        finally:
            writer.transport.abort()

    def _between(self, source: str | None, target: str | None) -> _Link:
        if source is None or target is None or source == target:
            return self._free_link
        return self._links[source, target]

    def _host_at(self, peer: tuple[str, int]) -> str | None:
        """Whose socket it is; None for the test's own. Raises ConnectionRefusedError for strangers: nobody could cut
        them off."""
        for connection in psutil.net_connections("tcp"):  # gRPC's are of IPv6, with an address of IPv4 mapped into it
            if connection.laddr and (connection.laddr.ip.removeprefix("::ffff:"), connection.laddr.port) == peer:
                if connection.pid == os.getpid():
                    return None
                if connection.pid in self._host_of:
                    return self._host_of[connection.pid]
        raise ConnectionRefusedError(f"{peer} belongs to no host")


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, link: _Link) -> None:
    """Carry bytes and their end over a link."""
    chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_CHUNKS)
    loop = asyncio.get_running_loop()

    async def take() -> None:
        data = b"more"
        while data:
            data = await reader.read(_READ_BYTES)
            await chunks.put((loop.time(), data))

    async def give() -> None:
        while True:
            sent_s, data = await chunks.get()
            await link.pass_through(len(data), sent_s)
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    async with asyncio.TaskGroup() as both:
        both.create_task(take())
        both.create_task(give())
