"""`phasemesh role` against a real Redis, in which the test stands for the workers and their scheduler."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from phasemesh.roles import read_roles, until_in_force, wish_role
from phasemesh.stack import plan_stack, worker_roles
from phasemesh.state import StateDir
from tests.cli.test_command_line import one_line, phasemesh
from tests.redis_fixture import redis_url
from wire import keys
from wire.config import LauncherConfig, load
from wire.entries import CellCard, CellWorker, WorkerEntry
from wire.errors import ConfigInvalid, MeshError
from wire.ids import WorkerId
from wire.plan import Role
from wire.redis_client import open_redis

__all__ = ["redis_url"]

PREFILL, DECODE, BOTH = Role.PREFILL, Role.DECODE, Role.BOTH


@dataclass
class Cell:
    """One cell's keys in Redis."""

    redis: Any
    url: str
    name: str

    @property
    def environ(self) -> dict[str, str]:
        return {"PHASEMESH_REDIS_URL": self.url, "PHASEMESH_CELL": self.name}

    async def register(self, **roles: Role) -> None:
        """Workers, each with its own role."""
        for name, role in roles.items():
            entry: Any = WorkerEntry(WorkerId(name), f"127.0.0.1:92{len(name)}", 1, 1, role).encode()
            await self.redis.hset(keys.worker(self.name, WorkerId(name)), mapping=entry)
            await self.redis.zadd(keys.workers(self.name), {name: time.time() + 60})

    async def serve(self, **roles: Role) -> None:
        """A scheduler's card with these workers, each in this role."""
        workers = [CellWorker(WorkerId(name), role, running=3) for name, role in roles.items()]
        card: Any = CellCard("m", "r", 10, 10, 10, [1], len(workers), 1, 0.0, workers).encode()
        await self.redis.hset(keys.cell_card(self.name), mapping=card)

    async def wishes(self) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = await self.redis.hgetall(keys.roles(self.name))
        return found


@pytest.fixture
async def cell(redis_url: str) -> AsyncIterator[Cell]:
    redis: Redis
    async with open_redis(redis_url) as redis:
        yield Cell(redis, redis_url, uuid.uuid4().hex)


def lines_of(stdout: str) -> list[list[str]]:
    return [line.split() for line in stdout.splitlines()[1:]]


async def run(cell: Cell, *words: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(phasemesh, "role", *words, environ=cell.environ)
    return done.returncode, done.stdout, done.stderr


async def test_it_shows_address_role_running_sequences_and_what_is_pending(cell: Cell) -> None:
    await cell.register(w1=PREFILL, w22=BOTH, w333=BOTH)
    await cell.serve(w1=PREFILL, w22=BOTH)
    await cell.redis.hset(keys.roles(cell.name), mapping={"w22": DECODE, "w0": PREFILL})
    code, shown, _ = await run(cell)
    assert code == 0 and lines_of(shown) == [
        ["w0", "prefill", "gone;", "prefill", "is", "wished,", "should", "it", "come", "back"],
        ["w1", "127.0.0.1:922", "prefill", "3"],
        ["w22", "127.0.0.1:923", "both", "3", "decode", "is", "pending"],
        ["w333", "127.0.0.1:924", "both", "no", "scheduler", "has", "it"],
    ]
    code, shown, _ = await run(cell, "w1")
    assert [line[0] for line in lines_of(shown)] == ["w1"]


async def test_a_wish_is_written_and_reported_in_force_once_the_scheduler_has_it(cell: Cell) -> None:
    await cell.register(w1=BOTH, w2=BOTH)
    await cell.serve(w1=BOTH, w2=DECODE)  # as if the scheduler had been quick
    code, said, _ = await run(cell, "w2", "decode")
    assert (code, said) == (0, "w2 is decode now; 3 running sequence(s) run on\n")
    assert await cell.wishes() == {b"w2": b"decode"}
    await cell.serve(w1=BOTH, w2=BOTH)
    code, said, _ = await run(cell, "w2", "default")
    assert (code, said) == (0, "w2 is both now; 3 running sequence(s) run on\n")
    assert await cell.wishes() == {}


async def test_without_a_scheduler_the_wish_is_noted(cell: Cell) -> None:
    await cell.register(w1=BOTH, w2=BOTH)
    code, said, _ = await run(cell, "w2", "prefill")
    assert code == 0 and said.startswith("w2: prefill is noted")
    assert await cell.wishes() == {b"w2": b"prefill"}


async def test_a_worker_that_is_not_there_is_refused_by_name(cell: Cell) -> None:
    await cell.register(w1=BOTH, w2=BOTH)
    with pytest.raises(ConfigInvalid, match=r"worker 'w3': cell '.*' has w1, w2"):
        await wish_role(cell.redis, cell.name, "w3", PREFILL)
    done = await asyncio.to_thread(phasemesh, "role", "w3", "prefill", environ=cell.environ)
    assert "worker 'w3': cell" in one_line(done)
    assert await cell.wishes() == {}


@pytest.mark.parametrize(
    ("own", "worker", "wish", "missing"),
    [
        ({"w1": BOTH}, "w1", PREFILL, "decode"),
        ({"w1": BOTH}, "w1", DECODE, "prefill"),
        ({"w1": PREFILL, "w2": DECODE}, "w2", PREFILL, "decode"),
        ({"w1": PREFILL, "w2": DECODE}, "w1", DECODE, "prefill"),
    ],
)
async def test_the_last_worker_that_can_do_something_keeps_doing_it(
    cell: Cell, own: dict[str, Role], worker: str, wish: Role, missing: str
) -> None:
    await cell.register(**own)
    await cell.serve(**own)
    done = await asyncio.to_thread(phasemesh, "role", worker, wish, environ=cell.environ)
    said = one_line(done)
    assert f"worker '{worker}': no worker would be left that can {missing}" in said
    assert f"make another one {missing} or both first" in said
    assert await cell.wishes() == {}


async def test_wishes_count_not_only_what_workers_were_started_as(cell: Cell) -> None:
    own = {"w1": BOTH, "w2": BOTH, "w3": PREFILL}
    await cell.register(**own)
    await cell.serve(**own)
    await wish_role(cell.redis, cell.name, "w1", PREFILL)
    with pytest.raises(MeshError, match="can decode"):
        await wish_role(cell.redis, cell.name, "w2", PREFILL)
    await wish_role(cell.redis, cell.name, "w3", DECODE)
    await wish_role(cell.redis, cell.name, "w2", PREFILL)
    with pytest.raises(MeshError, match="can decode"):
        await wish_role(cell.redis, cell.name, "w3", None)  # its own role is prefill


async def test_a_worker_that_the_scheduler_does_not_have_is_no_substitute(cell: Cell) -> None:
    await cell.register(w1=BOTH, w2=BOTH)
    await cell.serve(w1=BOTH)
    with pytest.raises(MeshError, match="can decode"):
        await wish_role(cell.redis, cell.name, "w1", PREFILL)


async def test_the_wish_of_a_worker_that_is_gone_can_be_taken_back(cell: Cell) -> None:
    await cell.register(w1=BOTH)
    await cell.redis.hset(keys.roles(cell.name), "w9", PREFILL)
    await wish_role(cell.redis, cell.name, "w9", None)
    assert await cell.wishes() == {}
    assert await until_in_force(cell.redis, cell.name, "w9", 5.0) is None


async def test_two_operators_at_once_do_not_take_the_last_two_that_decode(cell: Cell) -> None:
    await cell.register(w1=BOTH, w2=BOTH)
    both = (wish_role(cell.redis, cell.name, name, PREFILL) for name in ("w1", "w2"))
    results = await asyncio.gather(*both, return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["MeshError", "NoneType"]
    assert len(await cell.wishes()) == 1


async def test_a_name_or_wish_that_is_not_ours_is_shown_as_none(cell: Cell) -> None:
    await cell.register(w1=BOTH)
    await cell.redis.hset(keys.roles(cell.name), mapping={"w1": b"\xffboss", b"\xff": b"prefill"})
    roles = {worker.worker_id: worker.wish for worker in await read_roles(cell.redis, cell.name)}
    assert roles == {"w1": None, "\ufffd": PREFILL}


def test_the_launcher_gives_each_worker_its_role(tmp_path: Path) -> None:
    environ = {"PHASEMESH_WORKERS": "3", "PHASEMESH_ROLES": "prefill, decode,decode"}
    config = load(LauncherConfig, environ)
    assert worker_roles(config) == [PREFILL, DECODE, DECODE]
    stack = plan_stack(config, environ, tmp_path, StateDir(tmp_path))
    assert [worker.environ["PHASEMESH_WORKER_ROLE"] for worker in stack.workers] == ["prefill", "decode", "decode"]
