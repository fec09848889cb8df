"""A whole mesh as processes on loopback, each of which a test may kill and start again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self
from urllib.error import URLError

from tests.redis_fixture import HERE, Place, RedisServer, die_with_parent, free_port

START_TIMEOUT_S = 60.0


class Service:
    """One of our services: its command's environment, its process, its log."""

    def __init__(
        self,
        name: str,
        module: str,
        environment: dict[str, str],
        health_url: str,
        log: Path,
        place: Place = HERE,
    ) -> None:
        self.name = name
        self.health_url = health_url
        self.log = log
        self._module = module
        self._environment = environment
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._process is None
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PHASEMESH_", "OTEL_"))}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._place.command([sys.executable, "-m", self._module]),
                env=inherited | self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )
        self._place.started(self._process.pid)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM and wait; kill -9 when it does not end. Returns the exit status."""
        return self._end(signal.SIGTERM, timeout_s)

    def _end(self, number: signal.Signals, timeout_s: float = 20.0) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return -signal.SIGKILL

    def is_healthy(self) -> bool:
        assert self._process is None or self._process.poll() is None, f"{self.name} ended:\n{self.log.read_text()}"
        try:
            with urllib.request.urlopen(self.health_url, timeout=2.0) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False

    def wait_healthy(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self.is_healthy():
            assert time.monotonic() < deadline_s, f"{self.name} is not healthy:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.02)

    def metric(self, name: str, label: str = "") -> float:
        """Sum of the samples of a metric that carry the label."""
        rows = [value for labels, value in self.samples(name).items() if label in labels]
        assert rows, f"{self.name} exports no {name} {label}"
        return sum(rows)

    def samples(self, name: str) -> dict[str, float]:
        """A metric's samples by their labels as they are written, e.g. `worker="worker-0",state="free"`."""
        with urllib.request.urlopen(self.health_url.replace("/health", "/metrics"), timeout=5.0) as answer:
            lines = answer.read().decode().splitlines()
        rows = [row.rsplit(" ", 1) for row in lines if row.startswith((f"{name}{{", f"{name} "))]
        return {labels.removeprefix(name).strip("{}"): float(value) for labels, value in rows}

    def wait_metric(self, name: str, at_least: float, timeout_s: float = 30.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while self.metric(name) < at_least:
            assert time.monotonic() < deadline_s, f"{name} of {self.name} stays below {at_least}"
            time.sleep(0.01)


class ServiceGroup:
    """Redis, a scheduler, workers and a gateway that start and end together: a context manager."""

    redis: RedisServer
    scheduler: Service
    workers: list[Service]
    gateway: Service

    @property
    def services(self) -> list[Service]:
        return [self.gateway, self.scheduler, *self.workers]

    def __enter__(self) -> Self:
        try:
            self.redis.start()
            for service in self.services:
                service.start()
            for service in self.services:
                service.wait_healthy()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for service in self.services:
            service.stop()
        self.redis.kill()

    def pages_in_use(self) -> int:
        """Over all workers, from the scheduler's metrics."""
        return int(self.scheduler_metric("phasemesh_scheduler_kv_pages", 'state="in_use"'))

    def wait_no_page_in_use(self, timeout_s: float = 5.0) -> None:
        """Every page is back. The metric is sampled, so it may lag the last terminal."""
        deadline_s = time.monotonic() + timeout_s
        while in_use := self.pages_in_use():
            assert time.monotonic() < deadline_s, f"{in_use} pages are still in use"
            time.sleep(0.02)

    def scheduler_metric(self, name: str, label: str = "") -> float:
        return self.scheduler.metric(name, label)


class MeshStack(ServiceGroup):
    """Redis, one scheduler, workers, one gateway. `env` reaches every service, e.g. {"STEP_TOKEN_BUDGET": "7"}.

    worker_env: of each worker alone, e.g. [{"WORKER_ROLE": "prefill"}, {}]; there are as many workers, then.
    """

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        *,
        workers: int = 1,
        worker_env: Sequence[Mapping[str, str]] = (),
        env: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.directory = directory
        worker_env = worker_env or [{}] * workers
        self.redis = RedisServer(directory, append_only=True)
        self.gateway_port = free_port()
        self.url = f"http://127.0.0.1:{self.gateway_port}"
        common = {
            "PHASEMESH_REDIS_URL": self.redis.url,
            "PHASEMESH_MODEL": str(model_dir),
            "PHASEMESH_MODEL_NAME": "m",
            "OMP_WAIT_POLICY": "PASSIVE",
        } | {(k if k.startswith("OTEL_") else f"PHASEMESH_{k}"): v for k, v in env.items()}
        self.scheduler = self._service("scheduler", "scheduler", common, "SCHEDULER_PORT")
        threads = str(max(1, (os.cpu_count() or 1) // len(worker_env)))
        self.workers = []
        for i, own in enumerate(worker_env):
            environment = {"WORKER_ID": f"worker-{i}", "WORKER_THREADS": threads, **own}
            environment = common | {f"PHASEMESH_{k}": v for k, v in environment.items()}
            self.workers.append(self._service(f"worker-{i}", "gpu_worker", environment, "WORKER_HEALTH_PORT"))
        gateway = common | {"PHASEMESH_PORT": str(self.gateway_port), "PHASEMESH_GATEWAY_ID": "gw"}
        self.gateway = Service("gateway", "gateway", gateway, f"{self.url}/health", directory / "gateway.log")

    def _service(self, name: str, module: str, environment: dict[str, str], port_variable: str) -> Service:
        port = free_port()
        environment = environment | {f"PHASEMESH_{port_variable}": str(port)}
        return Service(name, module, environment, f"http://127.0.0.1:{port}/health", self.directory / f"{name}.log")
