"""A real redis-server for tests: on a free port, killed with the test process however that ends.

`redis_url` is one server for the whole session: use a cell of your own in it. The others are servers of your own to
kill and start again: `redis_server` forgets everything then, the harder case; `durable_redis_server` does not.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from phasemesh import ports
from phasemesh.redis_server import find_server
from wire.child import die_with_parent

__all__ = [
    "HERE",
    "Place",
    "RedisServer",
    "die_with_parent",
    "durable_redis_server",
    "free_port",
    "redis_server",
    "redis_url",
    "silent_server",
]

START_TIMEOUT_S = 10.0
_taken: set[int] = set()
"""Ports given out in this session: never the same one twice."""


class Place:
    """Where a server of a test runs: here, or on one of a test's hosts (tests/mesh/hosts.py)."""

    address = "127.0.0.1"
    """For it to bind."""

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs a command there, as the very process that is started."""
        return list(command)

    def started(self, pid: int) -> None:
        """A process runs there now."""


HERE = Place()


class RedisServer:
    """One redis-server on one port; its data is in a directory of its own."""

    def __init__(
        self,
        directory: Path,
        *,
        append_only: bool = False,
        options: dict[str, str] | None = None,
        place: Place = HERE,
    ) -> None:
        """append_only: what was written survives kill -9, but for the last second. options: of redis-server."""
        self.port = free_port()
        self.url = f"redis://{place.address}:{self.port}/0"
        self._place = place
        self._directory = directory
        self._append_only = append_only
        self._options = options or {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers."""
        assert self._process is None
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._place.command([str(find_server()), *self.arguments()]),
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        self._place.started(self._process.pid)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "redis.log").read_text()
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.01)

    def arguments(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": self._place.address,
            "protected-mode": "no",  # it only listens where tests are
            "save": "",
            "appendonly": "yes" if self._append_only else "no",
            "dir": str(self._directory),
            **self._options,
        }
        return [word for name, value in options.items() for word in (f"--{name}", *value.split(" "))]

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=START_TIMEOUT_S)
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection((self._place.address, self.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(5) == b"+PONG"
        except OSError:
            return False


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that the whole session shares."""
    with running(RedisServer(tmp_path_factory.mktemp("redis"))) as server:
        yield server.url


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server of the test's own, which forgets everything when it is killed."""
    with running(RedisServer(tmp_path)) as server:
        yield server


@pytest.fixture
def durable_redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server of the test's own, which keeps its data over a kill, but for the last second at most."""
    with running(RedisServer(tmp_path, append_only=True)) as server:
        yield server


@contextmanager
def running(server: RedisServer) -> Iterator[RedisServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    """A port that stays free while its server is down: see phasemesh.ports."""
    return ports.free_port(_taken)


@asynccontextmanager
async def silent_server() -> AsyncIterator[str]:
    """The URL of a server that takes connections and never answers."""

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    async with silent:
        yield f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}/0"
