"""Keeps the prefix index in Redis as the engine's twin is (design §5).

    update() ─▸ which units changed, by worker ─▸ every COLLECT_S: where the twin has them now ─▸ one transaction each

What is written is looked up in the twin at that moment, so writing a unit twice, late or once for several changes is
all the same, and nothing that waits grows beyond the twin. Whatever goes wrong with Redis, a worker's part is
written anew afterwards, from the twin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kvstore.prefix_index import Holder, PrefixIndex
from kvstore.prefix_twin import PrefixTwin
from scheduler.commands import UpdateIndex
from scheduler.lease import Lease
from scheduler.redis_io import REDIS_ERRORS, Patience, is_of_its_key
from wire.errors import FenceLost
from wire.ids import Epoch, UnitHash, WorkerId

log = logging.getLogger(__name__)

COLLECT_S: Final = 0.2
"""Changes are collected for so long: the index is this much behind, and a busy cell writes it five times a second."""
CHECK_S: Final = 2.0
"""Without changes, each worker's part is looked for this often: it may have gone with a Redis that restarted."""
MAX_WRITE_UNITS: Final = 2048
"""In one transaction: some milliseconds of Redis's time and of the event loop's."""
MAX_CHANGED: Final = 65_536
"""Units of one worker that wait to be written; more, and its whole part is written anew instead."""
MAX_ENDED: Final = 1024
"""Parts that wait to be dropped; more, and the oldest are left to lapse."""


@dataclass(slots=True)
class _Part:
    """One worker's part of the index, as far as it is not yet what the twin says."""

    holder: Holder
    is_void: bool = True
    """To be written anew, whatever is there."""
    is_there: bool = False
    """Units of it were written, so that Redis must have the key."""
    is_refused: bool = False
    """Redis has something of somebody else's in its place."""
    changed: dict[UnitHash, None] = field(default_factory=dict)
    writing: list[UnitHash] = field(default_factory=list)
    """Taken from `changed`, and not there yet."""
    moving: set[UnitHash] | None = None
    """See IndexWriter.moving()."""

    @property
    def waits(self) -> bool:
        return not self.is_refused and (self.is_void or bool(self.changed))


class IndexWriter:
    """update() and worker_down() only take notes; run() writes."""

    def __init__(self, index: PrefixIndex, twin: PrefixTwin, lease: Lease) -> None:
        self._index = index
        self._twin = twin
        self._lease = lease
        self._parts: dict[WorkerId, _Part] = {}
        self._ended: dict[Holder, None] = {}
        self._work = asyncio.Event()

    # -- what the service and the audit hand in ----------------------------------------------------------------

    def update(self, command: UpdateIndex) -> None:
        """The twin changed so; it has changed already."""
        part = self._parts.get(command.worker_id)
        if part is None or command.fresh or part.holder.epoch != command.epoch:
            part = self._begin(Holder(command.worker_id, command.epoch))
        self._changed(part, command.stored)
        self._changed(part, command.dropped)
        self._work.set()

    def worker_down(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """Its session ended: nobody here can say any more what it holds."""
        part = self._parts.get(worker_id)
        if part is not None and part.holder.epoch == epoch:
            del self._parts[worker_id]
            self._end(part.holder)

    def repair(self, holder: Holder, units: Iterable[UnitHash]) -> None:
        """Redis is wrong about these."""
        part = self._parts.get(holder.worker_id)
        if part is not None and part.holder == holder:
            self._changed(part, units)
            self._work.set()

    @contextmanager
    def moving(self, holder: Holder) -> Iterator[Set[UnitHash] | None]:
        """Units that are on their way to Redis, or were at any time in this block: of all others Redis must say what
        the twin says. None: they all are."""
        part = self._parts.get(holder.worker_id)
        if part is None or part.holder != holder or part.is_void or part.is_refused:
            yield None
            return
        part.moving = {*part.changed, *part.writing}
        try:
            yield part.moving
        finally:
            part.moving = None

    def _begin(self, holder: Holder) -> _Part:
        before = self._parts.get(holder.worker_id)
        if before is not None and before.holder != holder:
            self._end(before.holder)
        part = self._parts[holder.worker_id] = _Part(holder)
        return part

    def _end(self, holder: Holder) -> None:
        self._ended[holder] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self._work.set()

    def _changed(self, part: _Part, units: Iterable[UnitHash]) -> None:
        units = list(units)
        if part.moving is not None:
            part.moving.update(units)
        if part.is_void:
            return
        part.changed.update(dict.fromkeys(units))
        if len(part.changed) > MAX_CHANGED:
            part.is_void = True
            part.changed.clear()

    # -- the writing task --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write for ever. Raises FenceLost when another scheduler is active."""
        patience = Patience(log, "writing the prefix index")
        while True:
            has_work = await self._wait_for_work()
            try:
                if has_work:
                    await asyncio.sleep(COLLECT_S)
                    self._work.clear()
                    await self._write()
                else:
                    await self._look()
            except REDIS_ERRORS as error:
                for part in self._parts.values():
                    part.is_void = True
                    part.changed.clear()
                self._work.set()
                await patience.after(error)
            else:
                patience.success()

    async def _wait_for_work(self) -> bool:
        try:
            async with asyncio.timeout(CHECK_S):
                await self._work.wait()
        except TimeoutError:
            return False
        return True

    async def _write(self) -> None:
        """All that waits; a worker's next MAX_WRITE_UNITS after everybody's first."""
        while self._ended:
            holder = next(iter(self._ended))
            await self._fenced(self._drop(holder))
            self._ended.pop(holder, None)
        waiting = True
        while waiting:
            waiting = False
            for part in list(self._parts.values()):
                if part.waits:
                    await self._fenced(self._write_some(part))
                    waiting = waiting or part.waits

    async def _write_some(self, part: _Part) -> None:
        anew = part.is_void
        if anew:
            part.changed = dict.fromkeys(self._twin.hashes(part.holder.worker_id))
            part.is_void = False
            if part.moving is not None:
                part.moving.update(part.changed)
        part.writing = list(islice(part.changed, MAX_WRITE_UNITS))
        for unit_hash in part.writing:
            del part.changed[unit_hash]  # from here on a change of it is news
        units = {unit_hash: self._twin.tiers(part.holder.worker_id, unit_hash) for unit_hash in part.writing}
        try:
            was_there = await self._index.write(part.holder, units, anew=anew)
        except ResponseError as error:
            self._refuse(part.holder, error)
            return
        finally:
            part.writing = []
        if part.is_there and not (was_there or anew):
            part.is_void = True  # it had lapsed, or Redis lost it
            part.changed.clear()
        part.is_there = any(units.values()) or (part.is_there and not anew)

    async def _look(self) -> None:
        """Have parts that are not there, but should be, written anew."""
        for part in list(self._parts.values()):
            if part.is_there and not part.is_refused:
                await self._fenced(self._look_for(part))

    async def _look_for(self, part: _Part) -> None:
        try:
            if not await self._index.write(part.holder, {}):
                part.is_void = True
                part.is_there = False  # if the twin has nothing either, that is all
                self._work.set()
        except ResponseError as error:
            self._refuse(part.holder, error)

    async def _drop(self, holder: Holder) -> None:
        try:
            await self._index.drop(holder)
        except ResponseError as error:
            self._refuse(holder, error)

    async def _fenced(self, writing: Coroutine[None, None, None]) -> None:
        """Raises FenceLost, or a Redis error when the fence is still ours: then try again."""
        try:
            await writing
        except FenceLost as lost:
            await self._lease.confirm()
            raise RedisConnectionError(lost.message) from lost

    def _refuse(self, holder: Holder, error: ResponseError) -> None:
        """Give a worker's part up until it begins anew. Raises what concerns more than its key."""
        if not is_of_its_key(error):
            raise error
        log.error("the prefix index goes without %s: %s", holder.worker_id, error)
        part = self._parts.get(holder.worker_id)
        if part is not None and part.holder == holder:
            part.is_refused = True
