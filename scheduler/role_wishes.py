"""Roles that operators gave workers at run time: what the hash in Redis says, and what the engine was told of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from scheduler.events import RoleChanged
from wire.ids import WorkerId
from wire.plan import Role, WorkerInfo

log = logging.getLogger(__name__)


class RoleWishes:
    """A wish lasts over its worker's sessions and restarts, until it is taken back: then the worker's own role counts.

    While Redis is away nothing is read, and the last wishes hold. A wish for a worker that is not there waits for it.
    """

    def __init__(self) -> None:
        self._wishes: dict[WorkerId, Role] = {}
        self._own: dict[WorkerId, Role] = {}
        self._told: dict[WorkerId, Role] = {}
        """What the engine has, of workers whose WorkerUp it was given."""
        self._malformed: dict[WorkerId, bytes] = {}

    def read(self, worker_ids: Iterable[WorkerId], values: Iterable[bytes | None]) -> None:
        """Take what Redis holds for these workers. What is no role is no wish, and is reported once."""
        for worker_id, value in zip(worker_ids, values, strict=True):
            wish = self._wish(worker_id, value)
            if wish is None:
                self._wishes.pop(worker_id, None)
            else:
                self._wishes[worker_id] = wish

    def worker_up(self, info: WorkerInfo) -> RoleChanged | None:
        """The engine was just given its WorkerUp, with its own role; returns what must follow."""
        self._own[info.worker_id] = self._told[info.worker_id] = info.role
        return self.change(info.worker_id)

    def forget(self, worker_id: WorkerId) -> None:
        """It is neither connected nor registered; if it comes back, its wish is read again."""
        for known in (self._wishes, self._own, self._told, self._malformed):
            known.pop(worker_id, None)

    def change(self, worker_id: WorkerId) -> RoleChanged | None:
        """What the engine must be told of a worker with an open session; the caller tells it, and just once."""
        told = self._told.get(worker_id)
        if told is None:
            return None
        wanted = self._wishes.get(worker_id, self._own[worker_id])
        if wanted is told:
            return None
        self._told[worker_id] = wanted
        log.info("worker's role: %s, was %s", wanted, told, extra={"worker": worker_id})
        return RoleChanged(worker_id, wanted)

    def _wish(self, worker_id: WorkerId, value: bytes | None) -> Role | None:
        if value is None:
            return None
        try:
            return Role(value.decode(errors="replace"))
        except ValueError:
            if self._malformed.get(worker_id) != value:
                self._malformed[worker_id] = value
                log.error("wished role %r: not one of %s", value, ", ".join(Role), extra={"worker": worker_id})
            return None
