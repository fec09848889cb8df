"""Keeps services running: starts each, waits until it is ready, restarts it when it dies, stops it when asked.

spawn ─▸ not ready ─probe─▸ ready ─▸ dies ─▸ backoff ─▸ spawn …
           │ ready_timeout_s            └─ MAX_DEATHS within DEATHS_WINDOW_S: ServiceFailed
           └─ first start only: ServiceFailed, as is dying before the first time ready
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from phasemesh.guard import Guard
from phasemesh.process import ChildProcess, describe_exit
from phasemesh.service_log import ServiceLog
from wire.errors import MeshError

FIRST_BACKOFF_S = 0.5
MAX_DEATHS = 5
DEATHS_WINDOW_S = 60.0
PROBE_EVERY_S = 0.1


class ServiceFailed(MeshError):
    """A service did not become ready, or keeps dying; the message ends with its last log lines."""

    code = "service_failed"


@dataclass(frozen=True, slots=True)
class Service:
    """What to run, and how to tell that it is ready."""

    name: str
    command: tuple[str, ...]
    probe: Callable[[], str | None]
    """Blocking, a few seconds at most: None when ready, else why not."""
    health_url: str
    environ: Mapping[str, str]
    ready_timeout_s: float = 60.0
    stop_timeout_s: float = 10.0
    """From SIGTERM to SIGKILL."""


class SupervisedService:
    """One service and its current process. `say` prints a line; `on_change` runs when pid or restarts change."""

    def __init__(
        self, service: Service, *, guard: Guard, logs: Path, say: Callable[[str], None], on_change: Callable[[], None]
    ) -> None:
        self.service = service
        self.restarts = 0
        self._guard = guard
        self._logs = logs
        self._say = say
        self._on_change = on_change
        self._log = ServiceLog(logs / f"{service.name}.log", lambda line: say(f"{service.name} | {line}"))
        self._process: ChildProcess | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)  # seconds on the monotonic clock

    @property
    def process(self) -> ChildProcess | None:
        """The running process, or the last one."""
        return self._process

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises ServiceFailed when it dies first or takes too long."""
        process = self._spawn()
        try:
            async with asyncio.timeout(self.service.ready_timeout_s):
                problem = await self._until_ready(process)
        except TimeoutError:
            last = await asyncio.to_thread(self.service.probe)
            problem = f"was not ready within {self.service.ready_timeout_s:g} s: {last}"
        if problem is not None:
            raise self._failed(problem)

    async def keep_running(self) -> NoReturn:
        """Restart the process whenever it ends. Raises ServiceFailed when it keeps dying."""
        while True:
            assert self._process is not None
            ending = describe_exit(await self._process.wait())
            now = time.monotonic()
            self._deaths.append(now)
            recent = sum(1 for death in self._deaths if now - death < DEATHS_WINDOW_S)
            if recent >= MAX_DEATHS:
                raise self._failed(f"{ending}, the {recent}th time within {DEATHS_WINDOW_S:g} s")
            backoff_s = FIRST_BACKOFF_S * 2 ** (recent - 1)
            self._say(f"{self.service.name} {ending}; starting it again in {backoff_s:g} s (log: {self._log.path})")
            await asyncio.sleep(backoff_s)
            self.restarts += 1
            process = self._spawn()
            if await self._until_ready(process) is None:
                self._say(f"{self.service.name} is ready again, pid {process.pid}")

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL after stop_timeout_s."""
        if self._process is not None:
            self._process.terminate()
            try:
                async with asyncio.timeout(self.service.stop_timeout_s):
                    await self._process.wait()
            except TimeoutError:
                self._say(f"{self.service.name} did not end within {self.service.stop_timeout_s:g} s; killing it")
                self._process.kill()
                await self._process.wait()
        self._log.close()

    def kill(self) -> None:
        """SIGKILL now; a stop() that waits for the process returns at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _spawn(self) -> ChildProcess:
        try:
            self._process = ChildProcess(
                self.service.command, self.service.environ, self._logs, self._guard, self._log.write
            )
        except OSError as error:
            raise ServiceFailed(f"{self.service.name} cannot be started: {error}") from error
        self._on_change()
        return self._process

    async def _until_ready(self, process: ChildProcess) -> str | None:
        """None when ready; when the process ends first, how."""
        while process.returncode is None:
            if await asyncio.to_thread(self.service.probe) is None:
                return None
            await asyncio.sleep(PROBE_EVERY_S)
        return describe_exit(process.returncode) + " before it was ready"

    def _failed(self, problem: str) -> ServiceFailed:
        return ServiceFailed(f"{self.service.name} {problem}; the end of {self._log.path}:\n{self._log.tail()}")


async def stop_in_order(groups: Sequence[Sequence[SupervisedService]]) -> None:
    """Stop the groups one after the other, the members of each together."""
    for group in groups:
        async with asyncio.TaskGroup() as tg:
            for supervised in group:
                tg.create_task(supervised.stop())
