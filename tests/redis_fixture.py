"""A real redis-server for tests: on a free port, killed with the test process however that ends.

`redis_url` is one server for the whole session: use a cell of your own in it. The others are servers of your own to
kill and start again: `redis_server` forgets everything then, the harder case; `durable_redis_server` does not.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from phasemesh import ports
from phasemesh.redis_server import find_server
from wire.child import die_with_parent

__all__ = ["RedisServer", "die_with_parent", "durable_redis_server", "free_port", "redis_server", "redis_url"]

START_TIMEOUT_S = 10.0
_taken: set[int] = set()
"""Ports given out in this session: never the same one twice."""


class RedisServer:
    """One redis-server on one port; its data is in a directory of its own."""

    def __init__(self, directory: Path, *, append_only: bool = False, options: dict[str, str] | None = None) -> None:
        """append_only: what was written survives kill -9, but for the last second. options: of redis-server."""
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._append_only = append_only
        self._options = options or {}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers."""
        assert self._process is None
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(find_server()), *self.arguments()],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "redis.log").read_text()
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.01)

    def arguments(self) -> list[str]:
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
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
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
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
