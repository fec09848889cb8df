"""Workers' roles at run time: what each is, and an operator's wish for another (docs/disaggregation.md).

A wish is a field of one Redis hash, wire.keys.roles; the cell's scheduler polls it and tells of it in its card.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, WatchError

from phasemesh.redis_server import without_password
from wire import keys
from wire.entries import CellCard, CellWorker, WorkerEntry
from wire.errors import ConfigInvalid, MeshError
from wire.ids import WorkerId
from wire.plan import Role
from wire.redis_client import open_redis

POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class WorkerRole:
    """What is known of one worker's role; one that is not there may still have a wish."""

    worker_id: WorkerId
    address: str | None
    """None: it is not registered."""
    own: Role | None
    wish: Role | None
    in_force: Role | None
    """None: no active scheduler has it."""
    running: int | None
    """Sequences; likewise."""

    @property
    def is_there(self) -> bool:
        return self.address is not None or self.in_force is not None

    @property
    def wanted(self) -> Role | None:
        """None only when all that is known of it is that a scheduler had it with another role than its own."""
        return self.wish or self.own

    @property
    def is_pending(self) -> bool:
        return self.is_there and self.wanted is not None and self.in_force is not self.wanted


@asynccontextmanager
async def open_cell(url: str, cell: str) -> AsyncIterator[Redis]:
    """Raises MeshError, naming the server, for whatever goes wrong with it inside."""
    try:
        async with open_redis(url, cell=cell) as redis:
            yield redis
    except (RedisError, OSError) as error:
        raise MeshError(f"{without_password(url)}: {error}") from error


async def read_roles(redis: Any, cell: str) -> list[WorkerRole]:
    """Every worker that is registered, that the scheduler has, or that has a wish, by name."""
    names = [_text(name) for name in await redis.zrangebyscore(keys.workers(cell), time.time(), "+inf")]
    raws = [(name, await redis.hgetall(keys.worker(cell, WorkerId(name)))) for name in names]
    entries = {name: WorkerEntry.decode(raw) for name, raw in raws if raw}
    wishes = {_text(name): _text(value) for name, value in (await redis.hgetall(keys.roles(cell))).items()}
    serving = await _serving(redis, cell) or {}
    found = []
    for name in sorted({*entries, *wishes, *serving}):
        entry, live = entries.get(name), serving.get(name)
        found.append(
            WorkerRole(
                worker_id=WorkerId(name),
                address=entry.address if entry else None,
                own=entry.role if entry else None,
                wish=Role(wishes[name]) if wishes.get(name) in set(Role) else None,
                in_force=live.role if live else None,
                running=live.running if live else None,
            )
        )
    return found


async def wish_role(redis: Any, cell: str, worker_id: str, wish: Role | None) -> None:
    """Ask for another role, or with None for the worker's own again.

    Raises ConfigInvalid for a worker that is not there, and MeshError when prompts or outputs would be left to none.
    """
    key = keys.roles(cell)
    while True:
        async with redis.pipeline() as pipe:
            await pipe.watch(key)  # two operators at once must not take the last two workers that decode
            _require_allowed(await read_roles(redis, cell), cell, worker_id, wish)
            pipe.multi()
            if wish is None:
                pipe.hdel(key, worker_id)
            else:
                pipe.hset(key, worker_id, wish)
            try:
                await pipe.execute()
                return
            except WatchError:
                continue


async def until_in_force(redis: Any, cell: str, worker_id: str, timeout_s: float) -> WorkerRole | None:
    """Wait until the scheduler has the worker in its wanted role; None when it does not come to that."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        worker = next((w for w in await read_roles(redis, cell) if w.worker_id == worker_id), None)
        if worker is not None and worker.is_there and not worker.is_pending:
            return worker
        if worker is None or not worker.is_there or time.monotonic() >= deadline_s:
            return None
        await asyncio.sleep(POLL_S)


def unknown_worker(worker_id: str, cell: str, workers: list[WorkerRole]) -> ConfigInvalid:
    names = ", ".join(worker.worker_id for worker in workers) or "no worker"
    return ConfigInvalid(f"worker {worker_id!r}: cell {cell!r} has {names}")


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


async def _serving(redis: Any, cell: str) -> dict[str, CellWorker] | None:
    """What the active scheduler's card says; None without one."""
    raw = await redis.hgetall(keys.cell_card(cell))
    return {worker.worker_id: worker for worker in CellCard.decode(raw).workers} if raw else None


def _require_allowed(workers: list[WorkerRole], cell: str, worker_id: str, wish: Role | None) -> None:
    target = next((worker for worker in workers if worker.worker_id == worker_id), None)
    there = [worker for worker in workers if worker.is_there]
    if target is None or not (target.is_there or wish is None):
        raise unknown_worker(worker_id, cell, there)
    if not target.is_there:
        return  # an old wish is taken back
    # Where a scheduler is active, a worker that it does not have runs nothing.
    serving = [worker for worker in there if worker.in_force is not None] or there
    others = [worker.wanted or worker.in_force for worker in serving if worker is not target]
    after = {*others, wish or target.own or target.in_force}
    for needed in (Role.PREFILL, Role.DECODE):
        if not {needed, Role.BOTH} & after:
            raise MeshError(
                f"worker {worker_id!r}: no worker would be left that can {needed}; "
                f"make another one {needed} or both first"
            )
