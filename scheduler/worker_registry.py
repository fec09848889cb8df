"""Which workers there are: polls their registrations and keeps one link to each (design §4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from kvstore.prefix_index import Holder
from observability.tracing import Tracer
from scheduler.clock import Clock
from scheduler.commands import DispatchPlan
from scheduler.events import Event, WorkerUp
from scheduler.lease import Lease
from scheduler.redis_io import REDIS_ERRORS, Patience, RefusedKeys, decoded, each_of_its_key
from scheduler.role_wishes import RoleWishes
from scheduler.worker_link import WorkerLink
from wire import keys
from wire.entries import WorkerEntry
from wire.errors import EntryMalformed
from wire.ids import WorkerId
from wire.plan import ModelCard, WorkerInfo
from wire.redis_pipe import Command, RedisPipe

log = logging.getLogger(__name__)

POLL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class WorkerSession:
    holder: Holder
    address: str
    """host:port."""


class WorkerRegistry:
    """The links to a cell's workers. Everyone must serve the model of the first that came; only a cell without any
    worker or request takes another."""

    def __init__(
        self,
        redis: Redis,
        cell: str,
        lease: Lease,
        *,
        scheduler_id: str,
        inbox: asyncio.Queue[Event],
        clock: Clock,
        tracer: Tracer,
        model_known: Callable[[ModelCard], Awaitable[None]],
        is_idle: Callable[[], bool],
    ) -> None:
        self._pipe = RedisPipe(redis)
        self._cell = cell
        self._lease = lease
        self._clock = clock
        self._model_known = model_known
        self._is_idle = is_idle
        self._model: ModelCard | None = None
        self._links: dict[WorkerId, WorkerLink] = {}
        self._roles = RoleWishes()
        self._refused = RefusedKeys(log)
        self.fence = lease.fence
        self.scheduler_id = scheduler_id
        self.inbox = inbox
        self.tracer = tracer

    def send(self, command: DispatchPlan) -> None:
        """Send a plan; dropped when its session is gone, for WorkerDown follows."""
        link = self._links.get(command.worker_id)
        if link is not None and link.epoch == command.epoch:
            link.send(command.plan)

    def sessions(self) -> list[WorkerSession]:
        """The open ones."""
        return [
            WorkerSession(Holder(worker_id, link.epoch), link.address)
            for worker_id, link in self._links.items()
            if link.epoch is not None
        ]

    async def run(self) -> None:
        """Follow the registrations for ever; while Redis is away, the links stay as they are. Raises FenceLost."""
        patience = Patience(log, "reading worker registrations")
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    registered = await self._read()
                except REDIS_ERRORS as error:
                    await patience.after(error)
                    continue
                patience.success()
                self._follow(registered, tasks)
                await self._tell_roles()
                await asyncio.sleep(POLL_S)

    async def _read(self) -> dict[WorkerId, WorkerEntry]:
        """The live registrations that can be read: in one round trip, unless there is a worker that has no link yet."""
        asked = sorted(self._links)  # a session outlives its registration
        live, raws = await self._ask(asked)
        if not live.issubset(asked):
            asked = sorted(live.union(asked))
            live, raws = await self._ask(asked)
        registered: dict[WorkerId, WorkerEntry] = {}
        for worker_id in sorted(live.intersection(asked)):
            raw = raws[worker_id]
            if not raw or self._refused.note(keys.worker(self._cell, worker_id), raw):
                continue
            try:
                registered[worker_id] = WorkerEntry.decode(dict(zip(raw[::2], raw[1::2], strict=True)))
            except EntryMalformed as error:
                log.error("worker registration: %s", error.message, extra={"worker": worker_id})
        return registered

    async def _ask(self, worker_ids: Sequence[WorkerId]) -> tuple[set[WorkerId], dict[WorkerId, Any]]:
        """Which workers are live, and what is registered of these; takes note of the roles that are wished for them."""
        roles = keys.roles(self._cell)
        commands: list[Command] = [("ZRANGEBYSCORE", keys.workers(self._cell), self._clock.now(), "+inf")]
        commands += [("HGETALL", keys.worker(self._cell, worker_id)) for worker_id in worker_ids]
        if worker_ids:
            commands.append(("HMGET", roles, *worker_ids))
        live, *answers = await self._pipe.execute(commands)
        if isinstance(live, ResponseError):
            raise live
        raws = each_of_its_key(answers)
        if worker_ids:
            wishes = raws.pop()
            if not self._refused.note(roles, wishes):
                self._roles.read(worker_ids, wishes)
        return {WorkerId(name) for name in decoded(live)}, dict(zip(worker_ids, raws, strict=True))

    def _follow(self, registered: dict[WorkerId, WorkerEntry], tasks: asyncio.TaskGroup) -> None:
        for worker_id, link in self._links.items():
            link.follow(registered.get(worker_id))
        for worker_id, entry in registered.items():
            if worker_id not in self._links:
                self._links[worker_id] = WorkerLink(entry, self)
                tasks.create_task(self._keep(worker_id))

    async def _tell_roles(self) -> None:
        for worker_id, link in list(self._links.items()):
            if link.epoch is not None and (change := self._roles.change(worker_id)):
                await self.inbox.put(change)

    async def _keep(self, worker_id: WorkerId) -> None:
        await self._links[worker_id].run()
        del self._links[worker_id]
        self._roles.forget(worker_id)

    # -- scheduler.worker_link.LinkOwner -----------------------------------------------------------------------

    def refusal(self, info: WorkerInfo) -> str | None:
        if self._model is None or info.model == self._model:
            return None
        if self._is_idle() and all(link.epoch is None for link in self._links.values()):
            return None  # nothing is left of the model we served
        return f"refused: serves {info.model}, this cell serves {self._model}"

    async def worker_up(self, event: WorkerUp) -> None:
        log.info(
            "worker up",
            extra={"worker": event.info.worker_id, "epoch": event.info.epoch, "residents": len(event.residents)},
        )
        before, self._model = self._model, event.info.model
        if before not in (None, self._model):
            log.warning("the cell serves another model now: %s", self._model)
            await self._model_known(self._model)  # waits for nothing: none is held
        await self.inbox.put(event)
        if change := self._roles.worker_up(event.info):
            await self.inbox.put(change)
        await self._model_known(event.info.model)

    async def fence_doubted(self) -> None:
        try:
            await self._lease.confirm()
        except REDIS_ERRORS as error:
            log.warning("fence not confirmed: %r", error)
