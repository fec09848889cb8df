"""Runs a compose file's services as processes on loopback: their own commands, environments and health checks.

What a container would see under a name (another service's host and port, a volume) is found in one table, Loopback;
a host, port or path that the table does not have fails the test.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
OURS = "phasemesh:"
"""How the images of our own services are named."""
STOP_TIMEOUT_S = 30.0
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
_ADDRESS = re.compile(r"(?<![\w.-])([a-z][a-z0-9-]*|\d+\.\d+\.\d+\.\d+):(\d+)(?!\d)")


def load_compose(path: Path = ROOT / "docker-compose.yml") -> dict[str, Any]:
    """The file as compose reads it where no variable is set. Raises ValueError for a variable without a default."""
    text = "\n".join(line for line in path.read_text().splitlines() if not line.lstrip().startswith("#"))
    text = _VARIABLE.sub(lambda match: match[2], text)
    if "${" in text:
        raise ValueError(f"{path.name}: a variable without a default")
    compose: dict[str, Any] = yaml.safe_load(text)
    return compose


def overlaid(base: Any, override: Any) -> Any:
    """Two parsed files as `docker compose -f base -f override` reads them; ours override no lists."""
    if not isinstance(base, dict):
        assert not isinstance(base, list)
        return override
    return {**base, **{key: overlaid(base[key], value) if key in base else value for key, value in override.items()}}


def active_services(compose: dict[str, Any], profiles: set[str]) -> dict[str, Any]:
    """Services without a profile, and those of the given ones."""
    return {
        name: service
        for name, service in compose["services"].items()
        if not service.get("profiles") or profiles & set(service["profiles"])
    }


@dataclass(frozen=True)
class Loopback:
    """The one table: where the names of the compose file are on this machine."""

    ports: dict[tuple[str, int], int]
    """(service, container port) → port on 127.0.0.1."""
    volumes: dict[str, Path]
    """Named volume → directory."""

    def port(self, service: str, port: int) -> int:
        if (service, port) not in self.ports:
            raise AssertionError(f"{service}:{port} is not in the table of the test")
        return self.ports[service, port]

    def text(self, service: str, text: str) -> str:
        """Every host:port in `text`, which belongs to `service`, as its loopback address."""

        def local(match: re.Match[str]) -> str:
            host = service if match[1] == "127.0.0.1" else match[1]
            return f"127.0.0.1:{self.port(host, int(match[2]))}"

        return _ADDRESS.sub(local, text)

    def variable(self, service: str, spec: dict[str, Any], name: str, value: str) -> str:
        """The value of one environment variable."""
        if name.endswith("_HOST"):
            assert value == "0.0.0.0", f"{service}: {name}={value}: a container must bind every address"
            return "127.0.0.1"
        if name.endswith("_PORT"):
            return str(self.port(service, int(value)))
        if value.startswith("/"):
            return str(self.path(service, spec, value))
        return self.text(service, value)

    def path(self, service: str, spec: dict[str, Any], path: str) -> Path:
        """A path inside one of the service's volumes."""
        for volume in spec.get("volumes", []):
            source, target = volume.split(":")[:2]
            if path == target or path.startswith(target + "/"):
                assert source in self.volumes, f"volume {source} is not in the table of the test"
                return self.volumes[source] / path[len(target) :].lstrip("/")
        raise AssertionError(f"{service}: {path} is in none of its volumes")


class LocalCompose:
    """Starts services in the order depends_on asks for, and stops what it started."""

    def __init__(
        self, services: dict[str, Any], loopback: Loopback, programs: dict[str, list[str]], logs: Path
    ) -> None:
        """`programs`: a command's first word → the words that stand for it here."""
        self._services = services
        self.loopback = loopback
        self._programs = programs
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> LocalCompose:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    def up(self, name: str) -> None:
        """Start a service and, before it, what it depends on."""
        if name in self._processes:
            return
        for dependency, how in self._services[name].get("depends_on", {}).items():
            self.up(dependency)
            match how["condition"]:
                case "service_healthy":
                    self.wait_until_healthy(dependency)
                case "service_completed_successfully":
                    assert self._processes[dependency].wait(60.0) == 0, self.log(dependency)
                case other:
                    raise AssertionError(f"{name} depends on {dependency}: {other}")
        self._start(name)

    def wait_until_healthy(self, name: str) -> None:
        """Run the service's own health check until it passes."""
        check = self._services[name]["healthcheck"]
        kind, *command = check["test"]
        assert kind == "CMD"
        deadline = time.monotonic() + 60.0
        while True:
            done = subprocess.run(
                self._command(name, command), env=self._environ(name), cwd=ROOT, capture_output=True, timeout=30.0
            )
            if done.returncode == 0:
                return
            assert self._processes[name].poll() is None, self.log(name)
            assert time.monotonic() < deadline, f"{name}: {done.stderr.decode()}\n{self.log(name)}"
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text()

    def _start(self, name: str) -> None:
        command = self._command(name, self._services[name]["command"])
        log = self._stack.enter_context((self._logs / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            command, env=self._environ(name), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        self._processes[name] = process
        self._stack.callback(self._stop, process)

    def _command(self, name: str, command: list[str]) -> list[str]:
        program, *arguments = command
        return [*self._programs[program], *(self.loopback.text(name, argument) for argument in arguments)]

    def _environ(self, name: str) -> dict[str, str]:
        """What the compose file gives it; of this process only what finds programs and home."""
        spec = self._services[name]
        given = {k: self.loopback.variable(name, spec, k, str(v)) for k, v in spec.get("environment", {}).items()}
        return {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **given}

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


PYTHON = [sys.executable]
