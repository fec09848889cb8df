"""A local stack of a benchmark's own: `phasemesh up` with its own Redis and free ports, until the block ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.openai_stream import BenchFailed
from wire.config import ModelConfig, load
from wire.model_path import model_path

READY = b"Ctrl-C stops it."
READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.02
METRICS_TIMEOUT_S = 10.0
INHERITED = frozenset({"PHASEMESH_MODEL", "PHASEMESH_MODEL_NAME", "PHASEMESH_CACHE_DIR"})
"""Of our own variables, the ones a stack takes from its caller: which model, and where it lies."""
_SERVICE_READY = re.compile(r"(\S+) is ready after ([0-9.]+) s")


@dataclass(frozen=True, slots=True)
class Stack:
    url: str
    """Of the gateway."""
    ready_s: float
    """From the command to the end of the launcher's first answer."""
    services_s: dict[str, float]
    """The same for each service, as the launcher says."""
    state_dir: Path

    def pids(self) -> dict[str, int]:
        """By service, `worker-1` and so on; those of now, as a service that dies is started again."""
        return {service["name"]: int(service["pid"]) for service in self._services()}

    def health_url(self, service: str) -> str:
        """Redis: its own URL."""
        return str(next(s["health_url"] for s in self._services() if s["name"] == service))

    def metric(self, service: str, name: str, label: str = "") -> float:
        """Sum of the samples of a service's metric that carry the label; 0 where nothing was counted yet. Raises
        BenchFailed when it exports no such metric."""
        return metric(self.health_url(service), name, label)

    def _services(self) -> list[dict[str, Any]]:
        services: list[dict[str, Any]] = json.loads((self.state_dir / "stack.json").read_text())["services"]
        return services


def metric(health_url: str, name: str, label: str = "") -> float:
    """Of the service whose /health is there: the sum of the samples that carry the label."""
    return sum(value for labels, value in samples(health_url, name).items() if label in labels)


def samples(health_url: str, name: str) -> dict[str, float]:
    """A metric's samples by their labels, as exported: `{worker="w"}`. Raises BenchFailed when there is no such one."""
    with urllib.request.urlopen(health_url.replace("/health", "/metrics"), timeout=METRICS_TIMEOUT_S) as answer:
        exported = answer.read().decode()
    if f"# TYPE {name} " not in exported:
        raise BenchFailed(f"{health_url} exports no {name}")
    rows = [line for line in exported.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return {row[len(name) :].rpartition(" ")[0]: float(row.rpartition(" ")[2]) for row in rows}


@contextmanager
def running_stack(options: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> Iterator[Stack]:
    """`phasemesh up OPTIONS` with these variables, named without PHASEMESH_; of the caller's own only INHERITED ones.

    Raises BenchFailed with the launcher's output when it ends before it is ready.
    """
    wanted = {"PORT": "0", "LOG_LEVEL": "warning"} | dict(variables or {})
    with tempfile.TemporaryDirectory(prefix="phasemesh-bench-") as directory:
        state_dir, console = Path(directory, "state"), Path(directory, "console")
        environ = inherited_environ() | {f"PHASEMESH_{name}": value for name, value in wanted.items()}
        began_s = time.monotonic()
        with console.open("wb") as output:
            launcher = subprocess.Popen(
                [sys.executable, "-m", "phasemesh", "up", "--state-dir", str(state_dir), *options],
                env=environ | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            said = _until_ready(launcher, console)
            ready_s = time.monotonic() - began_s
            services_s = {name: float(seconds) for name, seconds in _SERVICE_READY.findall(said)}
            url = json.loads((state_dir / "stack.json").read_text())["gateway_url"]
            yield Stack(url, ready_s, services_s, state_dir)
        finally:
            launcher.send_signal(signal.SIGTERM)
            try:
                launcher.wait(STOP_TIMEOUT_S)
            finally:
                launcher.kill()  # what has not ended by itself; its services die with it


def _until_ready(launcher: subprocess.Popen[bytes], console: Path) -> str:
    """Wait for the launcher's welcome; all it said."""
    deadline_s = time.monotonic() + READY_TIMEOUT_S
    while READY not in (said := console.read_bytes()):
        if launcher.poll() is not None or time.monotonic() > deadline_s:
            raise BenchFailed(f"phasemesh up is not ready:\n{console.read_text()}")
        time.sleep(POLL_S)
    return said.decode()


def inherited_environ() -> dict[str, str]:
    """The caller's environment without what would change a stack that is measured."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in INHERITED or not name.startswith(("PHASEMESH_", "OTEL_"))
    }


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a client must know to predict a simulated worker's tokens (gpu_worker.simulated_runner.TokenSource)."""

    model: str
    vocab_size: int
    eos_token_ids: list[int]


def model_facts() -> ModelFacts:
    """Of the model that a stack started here serves."""
    directory = model_path(load(ModelConfig, {k: v for k, v in os.environ.items() if k in INHERITED}))
    config = json.loads((directory / "config.json").read_text())
    generation = directory / "generation_config.json"
    eos = json.loads(generation.read_text())["eos_token_id"] if generation.is_file() else config["eos_token_id"]
    name = os.environ.get("PHASEMESH_MODEL_NAME") or directory.resolve().name
    return ModelFacts(name, config["vocab_size"], eos if isinstance(eos, list) else [eos])
