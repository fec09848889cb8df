"""`phasemesh status`: each service, how it is, and the role and KV pages of each worker."""

from __future__ import annotations

import argparse
import re
import time
import urllib.request
from collections.abc import Mapping

from observability.names import SCHEDULER_KV_PAGES, SCHEDULER_WORKER_SEQUENCES
from observability.probe import probe
from phasemesh import redis_server
from phasemesh.cli.options import Subparsers, add_command, add_option
from phasemesh.state import ServiceState, StackState, StateDir
from wire.config import LauncherConfig, load

STATUS = """\
Exit status 0 when every service is ready, 1 when one is not, 3 when no stack runs.

examples:
  phasemesh status
  phasemesh status --state-dir /tmp/two
"""
NOT_RUNNING = 3
SCRAPE_TIMEOUT_S = 3.0
_PAGES = re.compile(rf'^{SCHEDULER_KV_PAGES}{{state="(\w+)",worker="([^"]*)"}} (\S+)$', re.MULTILINE)
_ROLES = re.compile(rf'^{SCHEDULER_WORKER_SEQUENCES}{{role="(\w+)",worker="([^"]*)"}} (\S+)$', re.MULTILINE)


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "status", run, "Show the running stack's services.", STATUS)
    add_option(parser, "--state-dir", LauncherConfig, "state_dir", "D")


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    state = StateDir.of(load(LauncherConfig, environ))
    stack = state.running()
    if stack is None:
        print(f"no stack runs in {state.path}; `phasemesh up` starts one")
        return NOT_RUNNING
    print(f"{stack.gateway_url}  (pid {stack.pid}, {state.path})\n")
    print(f"{'service':<12} {'pid':>8} {'uptime':>10} {'restarts':>8}  health")
    healthy = True
    for service in stack.services:
        problem = _problem(service)
        healthy = healthy and problem is None
        uptime = "" if service.started_unix_s is None else _duration(time.time() - service.started_unix_s)
        print(f"{service.name:<12} {service.pid or '':>8} {uptime:>10} {service.restarts:>8}  {problem or 'ready'}")
    _print_workers(_scheduler_metrics(stack))
    return 0 if healthy else 1


def _problem(service: ServiceState) -> str | None:
    ask = redis_server.ping if service.health_url.startswith("redis") else probe
    return ask(service.health_url)


def _print_workers(exported: str) -> None:
    """Role, running sequences and KV pages of each worker, as the scheduler exports them."""
    pages: dict[str, dict[str, int]] = {}
    for state, worker, count in _PAGES.findall(exported):
        pages.setdefault(worker, {})[state] = int(float(count))
    roles = {worker: (role, int(float(running))) for role, worker, running in _ROLES.findall(exported)}
    for worker in sorted({*pages, *roles}):
        print()
        if worker in roles:
            role, running = roles[worker]
            print(f"role of {worker}: {role}, {running} sequence(s) running")
        if worker in pages:
            states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in pages[worker].items())
            print(f"KV pages of {worker}: {states}; {sum(pages[worker].values())} in all")


def _scheduler_metrics(stack: StackState) -> str:
    """What a scrape of the scheduler says; empty while it does not answer."""
    scheduler = next((s for s in stack.services if s.name == "scheduler"), None)
    if scheduler is None:
        return ""
    url = scheduler.health_url.removesuffix("/health") + "/metrics"
    try:
        with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as response:
            return str(response.read().decode())
    except OSError:
        return ""


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s" if m else f"{s}s"
