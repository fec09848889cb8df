"""A local stack's state directory: one stack at a time, and what others may know of it.

STATE/lock         flock held by the launcher while it lives
STATE/stack.json   the launcher and its services, rewritten at each change (`status` and `down` read it)
STATE/logs/        one log per service
STATE/redis/       the append-only file
"""

from __future__ import annotations

import fcntl
import json
import os
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from wire.config import LauncherConfig
from wire.errors import ConfigInvalid, MeshError


@dataclass(slots=True)
class ServiceState:
    """One service as `status` shows it. Times are unix seconds."""

    name: str
    health_url: str
    pid: int | None = None
    started_unix_s: float | None = None
    restarts: int = 0


@dataclass(slots=True)
class StackState:
    """The launcher, told apart from a later process with its pid by the kernel's start time."""

    pid: int
    start_ticks: int
    gateway_url: str
    services: list[ServiceState] = field(default_factory=list)


class StateDir:
    """Paths of one stack, and its stack.json."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.redis = path / "redis"
        self._stack_json = path / "stack.json"

    @classmethod
    def of(cls, config: LauncherConfig) -> StateDir:
        default = Path.home() / ".local" / "state" / "phasemesh"
        return cls((Path(config.state_dir).expanduser() if config.state_dir else default).absolute())

    @contextmanager
    def owned(self) -> Iterator[None]:
        """Be the directory's one stack. Raises ConfigInvalid, saying who is, when there is another."""
        try:
            for folder in (self.path, self.logs, self.redis):
                folder.mkdir(parents=True, exist_ok=True)
            lock = (self.path / "lock").open("w")
        except OSError as error:
            raise ConfigInvalid(
                f"state directory {self.path}: {error.strerror}", param="PHASEMESH_STATE_DIR"
            ) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigInvalid(self._who_runs(), param="PHASEMESH_STATE_DIR") from None
            try:
                yield
            finally:
                self._stack_json.unlink(missing_ok=True)

    def _who_runs(self) -> str:
        stack = self.running()
        who = f"pid {stack.pid}, {stack.gateway_url}" if stack else "still starting"
        return (
            f"a stack already runs in {self.path} ({who}); `phasemesh down` stops it, "
            "and a second one needs another --state-dir and --port"
        )

    def write(self, stack: StackState) -> None:
        temporary = self._stack_json.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(stack), indent=2))
        temporary.replace(self._stack_json)

    def running(self) -> StackState | None:
        """The stack whose launcher is alive, or None."""
        try:
            raw = json.loads(self._stack_json.read_text())
            services = [ServiceState(**s) for s in raw.pop("services")]
            stack = StackState(**raw, services=services)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise MeshError(f"{self._stack_json} is not readable: {error!r}") from error
        return stack if start_ticks(stack.pid) == stack.start_ticks else None


def local_url(launcher: LauncherConfig, environ: Mapping[str, str]) -> str:
    """Where the local gateway is: at a port that was named, else the running stack's, else the default."""
    stack = None if environ.get("PHASEMESH_PORT") else StateDir.of(launcher).running()
    return stack.gateway_url if stack else f"http://{launcher.gateway.host}:{launcher.gateway.port}"


def start_ticks(pid: int) -> int | None:
    """When a process started, in the kernel's clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command name before it may hold anything
    state, ticks = fields[0], int(fields[19])  # proc(5): fields 3 and 22
    return None if state in ("Z", "X") else ticks


def wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Wait until a process that is not our child ends; False when it outlives the timeout."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ready, _, _ = select.select([fd], [], [], timeout_s)
        return bool(ready)
    finally:
        os.close(fd)
