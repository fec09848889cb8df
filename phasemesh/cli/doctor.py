"""`phasemesh doctor`: what the stack needs, what is there, and what to do about the rest."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from phasemesh import models, redis_server
from phasemesh.cli.options import Subparsers, add_command, add_option
from phasemesh.stack import owns_redis, require_ports
from phasemesh.state import StateDir
from wire.config import CellConfig, GatewayConfig, LauncherConfig, ModelConfig, load
from wire.errors import ConfigInvalid, MeshError
from wire.model_path import model_path

DOCTOR = """\
Exit status 0 when `phasemesh up` can run here, 1 when something is in its way.

examples:
  phasemesh doctor
  phasemesh doctor --port 9000 --model ~/models/Qwen3-0.6B
"""
TORCH_TIMEOUT_S = 120.0
_TORCH_FACTS = """
import json, torch
gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
print(json.dumps({"version": torch.__version__, "gpu": gpu}))
"""


@dataclass(frozen=True, slots=True)
class Problem(Exception):
    """Something is missing or in the way."""

    what: str
    advice: str


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "doctor", run, "Check what the stack needs.", DOCTOR)
    add_option(parser, "--model", ModelConfig, "model", "DIR|NAME")
    add_option(parser, "--port", GatewayConfig, "port", "P")
    add_option(parser, "--redis-url", CellConfig, "redis_url", "U")
    add_option(parser, "--state-dir", LauncherConfig, "state_dir", "D")


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = load(LauncherConfig, environ)
    checks: dict[str, Callable[[], str]] = {
        "python": _python,
        "torch": partial(_torch, config),
        "redis": partial(_redis, config, environ),
        "ports": partial(_ports, config),
        "model": partial(_model, config),
    }
    problems = 0
    for name, check in checks.items():
        try:
            print(f"ok    {name:<8}{check()}", flush=True)
        except Problem as problem:
            problems += 1
            print(f"FAIL  {name:<8}{problem.what}\n      {'':<8}→ {problem.advice}", flush=True)
    print(f"\n{problems} problem(s)" if problems else "\n`phasemesh up` can run here")
    return 1 if problems else 0


def _python() -> str:
    if sys.platform != "linux":
        raise Problem(f"{sys.platform}", "the launcher needs Linux; docker-compose.yml runs the mesh elsewhere")
    return f"{sys.version.split()[0]}, {len(os.sched_getaffinity(0))} core(s)"


def _torch(config: LauncherConfig) -> str:
    """In a process of its own: a broken torch may take the process with it."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH_FACTS], capture_output=True, text=True, timeout=TORCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise Problem(f"import takes over {TORCH_TIMEOUT_S:g} s", "is the disk very slow?") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise Problem(last, "`make up` installs the pinned version, or: pip install -c constraints.txt torch")
    facts = json.loads(done.stdout)
    if config.worker.device.startswith("cuda") and facts["gpu"] is None:
        raise Problem(
            f"{facts['version']} sees no CUDA device, but PHASEMESH_DEVICE={config.worker.device}",
            "check `nvidia-smi` and that torch is a CUDA build, or unset PHASEMESH_DEVICE",
        )
    wanted = config.worker.device
    device = facts["gpu"] if facts["gpu"] and wanted != "cpu" else "cpu"
    return f"{facts['version']}, device {device}"


def _redis(config: LauncherConfig, environ: Mapping[str, str]) -> str:
    if owns_redis(config, environ):
        try:
            return f"{redis_server.find_server()} (the stack starts its own)"
        except ConfigInvalid as error:
            raise Problem("no server", error.message) from None
    problem = redis_server.ping(config.gateway.cell.redis_url, config.gateway.cell.cell)
    if problem:
        raise Problem(problem, "start it, or unset PHASEMESH_REDIS_URL and the stack starts its own")
    return "answers PING"


def _ports(config: LauncherConfig) -> str:
    stack = StateDir.of(config).running()
    if stack:
        return f"a stack already serves {stack.gateway_url} (`phasemesh status`)"
    try:
        require_ports(config)
    except ConfigInvalid as error:
        raise Problem(error.message, "`phasemesh status` shows a stack of yours") from None
    gateway = f"{config.gateway.port} on {config.gateway.host}" if config.gateway.port else "any"
    return f"{gateway} for the gateway, and free ones for the other services"


def _model(config: LauncherConfig) -> str:
    model = config.gateway.model
    try:
        if model.model not in models.KNOWN_MODELS:
            return str(model_path(model))
        found = models.find(model, model.model)
    except MeshError as error:
        raise Problem(error.message, "`phasemesh models list` names what can be pulled") from None
    if found:
        return str(found)
    missing = models.missing_converters()
    if missing:
        raise Problem(f"{model.model} is not pulled and {', '.join(missing)} missing", models.CONVERTER_ADVICE)
    return f"{model.model} is not pulled yet; `phasemesh up` fetches it"
