"""Keeps services running: starts each, waits until it is ready, restarts it when it dies, stops it when asked.

spawn ─▸ not ready ─probe─▸ ready ─▸ dies ─▸ backoff ─▸ spawn …
           │                            └─ max_deaths in a row: ServiceFailed; settled_s of being ready end a row
           └─ dies, or is killed after ready_timeout_s: counts like any death; at the first start: ServiceFailed
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from phasemesh.guard import Guard
from phasemesh.process import ChildProcess, describe_exit
from phasemesh.service_log import ServiceLog
from wire.errors import MeshError

PROBE_EVERY_S = 0.1


class ServiceFailed(MeshError):
    """A service did not become ready, or keeps dying; the message ends with its last log lines."""

    code = "service_failed"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often, and how soon, a service that dies is started again."""

    max_deaths: int = 5
    """So many in a row end the supervision."""
    first_backoff_s: float = 0.5
    """Doubles with each death in a row."""
    settled_s: float = 30.0
    """A service that was ready for so long is well: its next death is the first of a row."""

    def backoff_s(self, deaths: int) -> float:
        return self.first_backoff_s * float(2 ** (deaths - 1))


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
    """From each start."""
    stop_timeout_s: float = 10.0
    """From SIGTERM to SIGKILL."""


class SupervisedService:
    """One service and its current process. `say` prints a line; `on_change` runs when pid or restarts change."""

    def __init__(
        self,
        service: Service,
        *,
        guard: Guard,
        logs: Path,
        say: Callable[[str], None],
        on_change: Callable[[], None],
        policy: RestartPolicy = RestartPolicy(),
    ) -> None:
        self.service = service
        self.restarts = 0
        self._guard = guard
        self._logs = logs
        self._say = say
        self._on_change = on_change
        self._policy = policy
        self._log = ServiceLog(logs / f"{service.name}.log", lambda line: say(f"{service.name} | {line}"))
        self._process: ChildProcess | None = None
        self._deaths_in_a_row = 0
        self._ready_since_s: float | None = None
        """When the running process became ready, on the event loop's clock."""

    @property
    def process(self) -> ChildProcess | None:
        """The running process, or the last one."""
        return self._process

    async def start(self) -> None:
        """Start it and wait until it is ready. Raises ServiceFailed when it dies first or takes too long."""
        problem = await self._until_ready(self._spawn())
        if problem is not None:
            raise self._failed(problem)

    async def keep_running(self) -> NoReturn:
        """Restart the process whenever it ends. Raises ServiceFailed when it keeps dying."""
        assert self._process is not None
        while True:
            problem: str | None = describe_exit(await self._process.wait())
            while problem is not None:
                await self._back_off(problem)
                self.restarts += 1
                process = self._spawn()
                problem = await self._until_ready(process)
            self._say(f"{self.service.name} is ready again, pid {process.pid}")

    async def _back_off(self, problem: str) -> None:
        """Count a death and wait before the next start. Raises ServiceFailed when it is one too many."""
        now_s = asyncio.get_running_loop().time()
        if self._ready_since_s is not None and now_s - self._ready_since_s >= self._policy.settled_s:
            self._deaths_in_a_row = 0
        self._ready_since_s = None
        self._deaths_in_a_row += 1
        if self._deaths_in_a_row >= self._policy.max_deaths:
            raise self._failed(f"{problem} (failure {self._deaths_in_a_row} in a row)")
        backoff_s = self._policy.backoff_s(self._deaths_in_a_row)
        self._say(f"{self.service.name} {problem}; starting it again in {backoff_s:g} s (log: {self._log.path})")
        await asyncio.sleep(backoff_s)

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
        """None when ready, else why not: the process ended first, or was killed here because it took too long."""
        last: str | None = "not probed"
        try:
            async with asyncio.timeout(self.service.ready_timeout_s):
                while process.returncode is None:
                    last = await asyncio.to_thread(self.service.probe)
                    if last is None:
                        self._ready_since_s = asyncio.get_running_loop().time()
                        return None
                    await asyncio.sleep(PROBE_EVERY_S)
        except TimeoutError:
            self.kill()
            await process.wait()
            return f"was not ready within {self.service.ready_timeout_s:g} s: {last}"
        return describe_exit(process.returncode) + " before it was ready"

    def _failed(self, problem: str) -> ServiceFailed:
        return ServiceFailed(f"{self.service.name} {problem}; the end of {self._log.path}:\n{self._log.tail()}")


async def stop_in_order(groups: Sequence[Sequence[SupervisedService]]) -> None:
    """Stop the groups one after the other, the members of each together."""
    for group in groups:
        async with asyncio.TaskGroup() as tg:
            for supervised in group:
                tg.create_task(supervised.stop())
