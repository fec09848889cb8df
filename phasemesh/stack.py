"""The local stack's services: their commands, environments and ports. Pure but for looking for free ports."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from observability.probe import probe
from phasemesh import redis_server
from phasemesh.ports import free_port, require_free
from phasemesh.state import StateDir
from phasemesh.supervisor import Service
from wire.config import LauncherConfig
from wire.errors import ConfigInvalid
from wire.model_path import cache_root
from wire.plan import Role

LOOPBACK = "127.0.0.1"
WORKER_READY_TIMEOUT_S = 600.0
"""Loading a large checkpoint from a cold disk takes minutes."""
WORKERS_PER_CORE = 4
DRAIN_MARGIN_S = 5.0
"""A gateway gets this much longer than its own drain time before it is killed."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Services by role; redis is None when the stack uses somebody else's."""

    gateway_url: str
    redis_url: str
    redis: Service | None
    scheduler: Service
    workers: tuple[Service, ...]
    gateway: Service

    @property
    def stop_order(self) -> list[list[Service]]:
        """No new work in, running work out, then what it ran on."""
        redis = [self.redis] if self.redis else []
        return [[self.gateway], [self.scheduler], list(self.workers), redis]


def plan_stack(config: LauncherConfig, environ: Mapping[str, str], model: Path, state: StateDir) -> Stack:
    """Lay out the stack; `model` is the directory to serve. Raises ConfigInvalid."""
    taken = {config.gateway.port}
    port = config.gateway.port or free_port(taken)
    gateway_url = f"http://{_reachable(config.gateway.host)}:{port}"
    redis = None
    redis_url = config.gateway.cell.redis_url
    if owns_redis(config, environ):
        redis, redis_url = _redis(free_port(taken), environ, state)
    shared = {
        **environ,
        "PHASEMESH_REDIS_URL": redis_url,
        "PHASEMESH_MODEL": str(model),
        "PHASEMESH_CACHE_DIR": str(cache_root(config.gateway.model).absolute()),
    }
    scheduler_port = free_port(taken)
    return Stack(
        gateway_url=gateway_url,
        redis_url=redis_url,
        redis=redis,
        scheduler=_service(
            "scheduler",
            "scheduler",
            f"http://{LOOPBACK}:{scheduler_port}",
            {**shared, "PHASEMESH_SCHEDULER_HOST": LOOPBACK, "PHASEMESH_SCHEDULER_PORT": str(scheduler_port)},
        ),
        workers=tuple(
            _worker(number, role, config, shared, free_port(taken), own_redis=redis is not None)
            for number, role in enumerate(worker_roles(config), start=1)
        ),
        gateway=_service(
            "gateway",
            "gateway",
            gateway_url,
            {**shared, "PHASEMESH_PORT": str(port)},
            ready_timeout_s=WORKER_READY_TIMEOUT_S,  # a gateway is ready when a worker is
            stop_timeout_s=config.gateway.drain_s + DRAIN_MARGIN_S,
        ),
    )


def owns_redis(config: LauncherConfig, environ: Mapping[str, str]) -> bool:
    """A Redis that was named is used; without one the stack starts its own."""
    return config.start_redis and not environ.get("PHASEMESH_REDIS_URL")


def require_ports(config: LauncherConfig) -> None:
    """Raise ConfigInvalid, saying what to do, unless the stack can listen on each port that it needs."""
    gateway, worker = config.gateway, config.worker
    if gateway.port:
        require_free(gateway.host, gateway.port, "PHASEMESH_PORT", "--port (PHASEMESH_PORT)")
    if worker.port and config.workers == 1:
        require_free(worker.host, worker.port, "PHASEMESH_WORKER_PORT", "PHASEMESH_WORKER_PORT")
    taken = {gateway.port, worker.port}
    for _ in range(2 + config.workers):  # Redis, scheduler, workers: wherever there is room
        free_port(taken)


def require_cores(config: LauncherConfig) -> None:
    """More workers than this only take each other's memory. Raises ConfigInvalid."""
    cores = len(os.sched_getaffinity(0))
    most = WORKERS_PER_CORE * cores
    if config.workers > most:
        raise ConfigInvalid(
            f"PHASEMESH_WORKERS={config.workers}: at most {most} on {cores} cores", param="PHASEMESH_WORKERS"
        )


def worker_roles(config: LauncherConfig) -> list[Role]:
    """One for each worker. Raises ConfigInvalid: not as many, or prompts or outputs are left to none."""
    if config.roles is None:
        name, text = "PHASEMESH_WORKER_ROLE", config.worker.role
        roles = [Role(text)] * config.workers
    else:
        name, text = "PHASEMESH_ROLES", config.roles
        words = [word.strip() for word in text.split(",")]
        if unknown := [word for word in words if word not in set(Role)]:
            raise ConfigInvalid(f"{name}={text!r}: {unknown[0]!r} is not one of {', '.join(Role)}", param=name)
        if len(words) != config.workers:
            raise ConfigInvalid(
                f"{name}={text!r}: {len(words)} role(s) for {config.workers} worker(s), one for each", param=name
            )
        roles = [Role(word) for word in words]
    for needed in (Role.PREFILL, Role.DECODE):
        if not {needed, Role.BOTH} & set(roles):
            raise ConfigInvalid(f"{name}={text!r}: no worker can {needed}; one must be {needed} or both", param=name)
    return roles


def worker_threads(config: LauncherConfig) -> int:
    """Compute threads of each worker: its share of the cores we may use (design §12)."""
    return config.worker.threads or max(1, len(os.sched_getaffinity(0)) // config.workers)


def _redis(port: int, environ: Mapping[str, str], state: StateDir) -> tuple[Service, str]:
    url = f"redis://{LOOPBACK}:{port}/0"
    service = Service(
        name="redis",
        command=redis_server.server_command(redis_server.find_server(), port, state.redis),
        probe=partial(redis_server.ping, url),
        health_url=url,
        environ=environ,
    )
    return service, url


def _worker(
    number: int, role: Role, config: LauncherConfig, shared: Mapping[str, str], health_port: int, *, own_redis: bool
) -> Service:
    # On a Redis of others, worker ids must differ from other stacks' too.
    base = config.worker.worker_id or ("worker" if own_redis else f"{socket.gethostname()}-{os.getpid()}-worker")
    threads = str(worker_threads(config))
    environ = {
        **shared,
        "PHASEMESH_WORKER_ID": f"{base}-{number}",
        "PHASEMESH_WORKER_ROLE": role,
        "PHASEMESH_WORKER_PORT": str(config.worker.port if config.workers == 1 else 0),
        "PHASEMESH_WORKER_HEALTH_HOST": LOOPBACK,
        "PHASEMESH_WORKER_HEALTH_PORT": str(health_port),
        "PHASEMESH_WORKER_THREADS": threads,
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "PASSIVE",  # two spinning OpenMP pools on few cores are ruinous
    }
    return _service(
        f"worker-{number}",
        "gpu_worker",
        f"http://{LOOPBACK}:{health_port}",
        environ,
        ready_timeout_s=WORKER_READY_TIMEOUT_S,
    )


def _service(
    name: str,
    module: str,
    url: str,
    environ: Mapping[str, str],
    *,
    ready_timeout_s: float = 60.0,
    stop_timeout_s: float = 10.0,
) -> Service:
    return Service(
        name=name,
        command=(sys.executable, "-m", module),
        probe=partial(probe, f"{url}/health"),
        health_url=f"{url}/health",
        environ=environ,
        ready_timeout_s=ready_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


def _reachable(host: str) -> str:
    """Where this machine reaches a server bound to `host`."""
    if host in ("0.0.0.0", "::", ""):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host
