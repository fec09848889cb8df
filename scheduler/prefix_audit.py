"""Compares what is said of each worker's KV: by the engine's twin, by the index in Redis, by the worker itself.

    twin  ◂──▸ Redis      differs: Redis is written again, from the twin
    twin  ◂──▸ worker     differs in two audits in a row: the engine is told what the worker holds

Changes are on their way all the time, from worker to engine to Redis. What differs from the worker only once is taken
for one of those, and what was on its way to Redis while we looked is no drift. Everything goes in slices: an audit of
100,000 units takes long and holds nobody up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc

from kvstore.prefix_index import Holder, PrefixIndex
from kvstore.prefix_twin import PrefixTwin
from observability.metrics import SchedulerMetrics
from scheduler.events import Event, ResidencyAudited
from scheduler.index_writer import IndexWriter
from scheduler.redis_io import REDIS_ERRORS
from scheduler.worker_registry import WorkerSession
from wire import worker_pb2 as pb
from wire.errors import EntryMalformed
from wire.ids import Epoch, UnitHash
from wire.plan import PageUnits, Residents, Tier, TierUnits
from wire.worker_codec import decode_residents
from wire.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

SLICE_UNITS: Final = 1000
"""Compared before others get the event loop."""
LIST_TIMEOUT_S: Final = 20.0
CHANNEL_OPTIONS: Final = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))


class ListUnits(Protocol):
    def __call__(self, address: str, epoch: Epoch) -> AsyncIterator[Residents]:
        """What the worker there holds, in pieces. Raises AioRpcError, also for another epoch than its own."""
        ...


async def list_units(address: str, epoch: Epoch) -> AsyncIterator[Residents]:
    """ListUnits over gRPC, on a connection of its own: a large list does not stand in a session's way."""
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        async for message in WorkerStub(channel).ListUnits(pb.ListUnitsRequest(epoch=epoch), timeout=LIST_TIMEOUT_S):
            yield decode_residents(message)


@dataclass(slots=True)
class _Held:
    """A worker's whole list."""

    pages: list[PageUnits] = field(default_factory=list)
    units: dict[Tier, set[UnitHash]] = field(default_factory=lambda: {tier: set() for tier in Tier})

    def add(self, residents: Residents) -> None:
        self.pages += residents.pages
        for page in residents.pages:
            self.units[Tier.DEVICE].update(page.unit_hashes)
        for below in residents.tiers:
            self.units[below.tier].update(below.stored)

    def tiers(self) -> list[TierUnits]:
        return [TierUnits(t, list(held)) for t, held in self.units.items() if held and t is not Tier.DEVICE]


Differing = dict[Tier, set[UnitHash]]


class PrefixAudit:
    def __init__(
        self,
        index: PrefixIndex,
        twin: PrefixTwin,
        writer: IndexWriter,
        sessions: Callable[[], list[WorkerSession]],
        inbox: asyncio.Queue[Event],
        metrics: SchedulerMetrics,
        *,
        period_s: float,
        list_units: ListUnits = list_units,
    ) -> None:
        """period_s: 0 never audits."""
        self._index = index
        self._twin = twin
        self._writer = writer
        self._sessions = sessions
        self._inbox = inbox
        self._metrics = metrics
        self._period_s = period_s
        self._list_units = list_units
        self._last: dict[Holder, tuple[Differing, Differing]] = {}
        """What differed from each worker in the last audit: only the twin had it, only the worker did."""
        self._silent: set[Holder] = set()
        """Workers that do not answer, said once."""

    async def run(self) -> None:
        while self._period_s:
            await asyncio.sleep(self._period_s)
            await self.audit()

    async def audit(self) -> None:
        """All workers with an open session, one after the other."""
        sessions = self._sessions()
        live = {session.holder for session in sessions}
        self._last = {holder: last for holder, last in self._last.items() if holder in live}
        self._silent &= live
        for session in sessions:
            holder = session.holder
            self._metrics.prefix_units.labels(holder.worker_id).set(self._twin.count(holder.worker_id))
            try:
                await self._audit_redis(holder)
            except REDIS_ERRORS as error:
                log.warning("the prefix index in Redis is not audited: %r", error)
            try:
                await self._audit_worker(session)
            except (grpc.aio.AioRpcError, EntryMalformed) as error:
                self._last.pop(holder, None)
                if holder not in self._silent:
                    log.warning("%s does not list its units: %s", holder.worker_id, _reason(error))
                    self._silent.add(holder)
            else:
                self._silent.discard(holder)

    # -- twin and Redis ----------------------------------------------------------------------------------------

    async def _audit_redis(self, holder: Holder) -> None:
        with self._writer.moving(holder) as moving:
            suspects = [] if moving is None else await self._differing_in_redis(holder)
            wrong = [unit_hash for unit_hash in suspects if moving is not None and unit_hash not in moving]
        if not self._is_live(holder):
            return
        self._metrics.set_drift(holder.worker_id, "twin-redis", len(wrong))
        if wrong:
            log.warning("the prefix index in Redis was wrong", extra={"worker": holder.worker_id, "units": len(wrong)})
            self._writer.repair(holder, wrong)
            self._metrics.prefix_repairs.labels(holder.worker_id, "redis").inc(len(wrong))

    async def _differing_in_redis(self, holder: Holder) -> list[UnitHash]:
        """Also what changed while we looked."""
        worker_id = holder.worker_id
        differing: list[UnitHash] = []
        found: set[UnitHash] = set()
        async for part in self._index.units(holder):
            found.update(part)
            differing += [unit for unit, tiers in part.items() if self._twin.tiers(worker_id, unit) != tiers]
        async for some in _slices(self._twin.hashes(worker_id)):
            differing += [unit for unit in some if unit not in found and self._twin.tiers(worker_id, unit)]
        return differing

    # -- twin and worker ---------------------------------------------------------------------------------------

    async def _audit_worker(self, session: WorkerSession) -> None:
        holder = session.holder
        before = self._twin.hashes(holder.worker_id)
        held = _Held()
        async for residents in self._list_units(session.address, holder.epoch):
            held.add(residents)
        missing = await self._not_held(holder, before, held)
        unknown = await self._not_known(holder, held)
        if not self._is_live(holder):
            return
        last_missing, last_unknown = self._last.get(holder, ({}, {}))
        self._last[holder] = missing, unknown
        missing, unknown = _in_both(missing, last_missing), _in_both(unknown, last_unknown)
        self._metrics.set_drift(holder.worker_id, "twin-worker", sum(map(len, missing.values())))
        self._metrics.set_drift(holder.worker_id, "worker-twin", sum(map(len, unknown.values())))
        differing = {tier: frozenset(missing[tier] | unknown[tier]) for tier in Tier}
        differing = {tier: units for tier, units in differing.items() if units}
        if differing:
            count = sum(map(len, differing.values()))
            log.warning("the twin was wrong", extra={"worker": holder.worker_id, "units": count})
            self._metrics.prefix_repairs.labels(holder.worker_id, "twin").inc(count)
            await self._inbox.put(ResidencyAudited(holder.worker_id, holder.epoch, held.pages, held.tiers(), differing))

    def _is_live(self, holder: Holder) -> bool:
        """Else its session ended while we compared, and the twin has forgotten all of it."""
        return any(session.holder == holder for session in self._sessions())

    async def _not_held(self, holder: Holder, before: list[UnitHash], held: _Held) -> Differing:
        """What the twin said already before the worker was asked, and says still, but not the worker."""
        missing: Differing = {tier: set() for tier in Tier}
        async for some in _slices(before):
            for unit_hash in some:
                for tier in self._twin.tiers(holder.worker_id, unit_hash):
                    if unit_hash not in held.units[tier]:
                        missing[tier].add(unit_hash)
        return missing

    async def _not_known(self, holder: Holder, held: _Held) -> Differing:
        unknown: Differing = {tier: set() for tier in Tier}
        for tier, units in held.units.items():
            async for some in _slices(list(units)):
                unknown[tier].update(u for u in some if tier not in self._twin.tiers(holder.worker_id, u))
        return unknown


async def _slices(units: list[UnitHash]) -> AsyncIterator[list[UnitHash]]:
    for start in range(0, len(units), SLICE_UNITS):
        yield units[start : start + SLICE_UNITS]
        await asyncio.sleep(0)


def _in_both(now: Differing, last: Differing) -> Differing:
    return {tier: units & last.get(tier, set()) for tier, units in now.items()}


def _reason(error: grpc.aio.AioRpcError | EntryMalformed) -> str:
    return error.message if isinstance(error, EntryMalformed) else f"{error.code().name}: {error.details()}"
