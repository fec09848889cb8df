"""Worker processes that a benchmark starts, kills and starts again, beside those of a stack."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

from bench.openai_stream import BenchFailed
from bench.stack import inherited_environ, metric
from wire.child import dying_with_us
from wire.plan import Role

HEALTHY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05


class WorkerProcess:
    """One worker by name: at most one process of it at a time, each with the same ports."""

    def __init__(self, name: str, role: Role, environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        port = _free_port()
        self._health_url = f"http://127.0.0.1:{port}/health"
        self._log = log
        self._environ = {
            **inherited_environ(),
            **environ,
            "PHASEMESH_WORKER_ID": name,
            "PHASEMESH_WORKER_ROLE": role,
            "PHASEMESH_WORKER_HEALTH_PORT": str(port),
            "PHASEMESH_LOG_LEVEL": "warning",
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping: list[subprocess.Popen[bytes]] = []

    @property
    def is_running(self) -> bool:
        """Started, and not told to go since."""
        return self._process is not None

    def start(self) -> None:
        """Harmless when it runs. A process of it that still stops is killed: there is one of a name."""
        if self._process is not None:
            return
        self._end_stopping()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                dying_with_us([sys.executable, "-m", "gpu_worker"]),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """SIGKILL."""
        self._leave(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM; it goes in its own time."""
        self._leave(signal.SIGTERM)

    def _leave(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            self._stopping.append(process)

    def _end_stopping(self) -> None:
        for process in self._stopping:
            process.kill()
            process.wait()
        self._stopping.clear()

    def end(self) -> None:
        """Nothing of it is left when this returns."""
        self.stop()
        for process in self._stopping:
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stopping.clear()

    async def until_healthy(self) -> None:
        """Raises BenchFailed when it ends, or takes too long."""
        try:
            async with asyncio.timeout(HEALTHY_TIMEOUT_S):
                while not await asyncio.to_thread(self._is_healthy):  # noqa: ASYNC110  # another process
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise BenchFailed(f"{self.name} is not healthy:\n{self._log.read_text()[-2000:]}") from None

    def _is_healthy(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise BenchFailed(f"{self.name} ended:\n{self._log.read_text()[-2000:]}")
        try:
            with urllib.request.urlopen(self._health_url, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def metric(self, name: str, label: str = "") -> float:
        return metric(self._health_url, name, label)


@contextmanager
def open_workers(
    wanted: Sequence[tuple[str, Role]], environ: Mapping[str, str], logs: Path
) -> Iterator[list[WorkerProcess]]:
    """Workers by name and role, started; none of them is left when the block ends."""
    workers = [WorkerProcess(name, role, environ, logs / f"{name}.log") for name, role in wanted]
    try:
        for worker in workers:
            worker.start()
        yield workers
    finally:
        for worker in workers:
            worker.end()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
