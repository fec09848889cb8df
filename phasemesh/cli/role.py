"""`phasemesh role`: show the workers' roles, or change one while the mesh runs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from phasemesh.cli.options import Subparsers, add_command, add_option
from phasemesh.state import StateDir
from wire.config import CellConfig, LauncherConfig, load
from wire.errors import ConfigInvalid
from wire.plan import Role

if TYPE_CHECKING:
    from phasemesh.roles import WorkerRole

ROLE = """\
Without a role it shows the workers; with one it asks the scheduler to give a worker that role. What runs on the
worker runs on, what comes follows the new role. The wish outlives the worker's restarts; `default` takes it back.
It is refused when no worker would be left that can prefill, or none that can decode.

examples:
  phasemesh role                            every worker: address, role, running sequences
  phasemesh role worker-2 prefill           worker-2 takes prompts only, from now on
  phasemesh role worker-2 default           what it was started as
  phasemesh role --redis-url redis://10.0.0.5:6379/0 worker-2 both
"""
DEFAULT = "default"
IN_FORCE_TIMEOUT_S = 3.0
"""A scheduler polls four times a second and writes its card twice."""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "role", run, "Show the workers' roles, or change one.", ROLE)
    parser.add_argument("worker", metavar="WORKER", nargs="?", help="Worker id, as `phasemesh role` shows it.")
    parser.add_argument("role", metavar="|".join((*Role, DEFAULT)), nargs="?", help="What it shall run.")
    add_option(parser, "--redis-url", CellConfig, "redis_url", "U")
    add_option(parser, "--state-dir", LauncherConfig, "state_dir", "D")


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = load(LauncherConfig, environ)
    if arguments.role is not None and arguments.role not in (*Role, DEFAULT):
        raise ConfigInvalid(f"role {arguments.role!r}: one of {', '.join((*Role, DEFAULT))}")
    url, cell = _redis_url(config, environ), config.gateway.cell.cell
    if arguments.role is None:
        return asyncio.run(_show(url, cell, arguments.worker))
    return asyncio.run(_change(url, cell, arguments.worker, arguments.role))


def _redis_url(config: LauncherConfig, environ: Mapping[str, str]) -> str:
    """The Redis that is named, else the running local stack's own. Raises ConfigInvalid without either."""
    if environ.get("PHASEMESH_REDIS_URL"):
        return config.gateway.cell.redis_url
    state = StateDir.of(config)
    stack = state.running()
    for service in stack.services if stack else ():
        if service.name == "redis":
            return service.health_url
    raise ConfigInvalid(f"no stack with a Redis of its own runs in {state.path}; name one with --redis-url")


async def _show(url: str, cell: str, worker_id: str | None) -> int:
    from phasemesh.roles import open_cell, read_roles, unknown_worker

    async with open_cell(url, cell) as redis:
        workers = await read_roles(redis, cell)
    shown = [worker for worker in workers if worker_id in (None, worker.worker_id)]
    if worker_id is not None and not shown:
        raise unknown_worker(worker_id, cell, workers)
    if not shown:
        print(f"cell {cell!r} has no worker")
        return 0
    width = max(len("worker"), *(len(worker.worker_id) for worker in shown))
    print(f"{'worker':<{width}}  {'address':<22} {'role':<8} {'running':>7}")
    for worker in shown:
        running = "" if worker.running is None else worker.running
        role = worker.in_force or worker.wanted or ""
        line = f"{worker.worker_id:<{width}}  {worker.address or '':<22} {role:<8} {running:>7}  {_note(worker)}"
        print(line.rstrip())
    return 0


def _note(worker: WorkerRole) -> str:
    if not worker.is_there:
        return f"gone; {worker.wish} is wished, should it come back"
    if worker.in_force is None:
        return "no scheduler has it"
    if worker.is_pending:
        return f"{worker.wanted} is pending"
    return f"as wished; its own is {worker.own}" if worker.wish else ""


async def _change(url: str, cell: str, worker_id: str, role: str) -> int:
    from phasemesh.roles import open_cell, until_in_force, wish_role

    async with open_cell(url, cell) as redis:
        await wish_role(redis, cell, worker_id, None if role == DEFAULT else Role(role))
        worker = await until_in_force(redis, cell, worker_id, IN_FORCE_TIMEOUT_S)
    if worker is None:
        print(f"{worker_id}: {role} is noted; it is in force when a scheduler has the worker")
    else:
        print(f"{worker_id} is {worker.in_force} now; {worker.running} running sequence(s) run on")
    return 0
