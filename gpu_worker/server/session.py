"""One scheduler's stream: plans in, reports out, until either side ends it.

stream ─▸ _read_plans  ─▸ executor ─▸ deliver ─▸ [reports] ─▸ _write ─▸ stream        all in one TaskGroup;
                                                   revoke  ─▸ _until_revoked           the first error ends it
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

import grpc

from gpu_worker.executor import Executor, PlanChannel, Snapshot, WorkerReport
from gpu_worker.transfer.host_id import host_id
from wire import worker_pb2 as pb
from wire.errors import EntryMalformed, FenceLost, MeshError, Overloaded, StepFailed
from wire.ids import UNIT_TOKENS, Fence, WorkerId
from wire.plan import PageUnits, PullReport, Role, SharedTier, StepReport, TierUnits, WorkerInfo
from wire.worker_codec import (
    decode_plan,
    encode_hello,
    encode_pull_report,
    encode_report,
    encode_residents,
    encode_tier_units,
)

RESIDENTS_MESSAGE_BYTES = 1 << 20
"""A Residents message is at most this long."""
MAX_UNSENT_REPORTS = 4096
"""A scheduler this far behind is not reading: its session ends."""

_HASH_BYTES = 32 + 2  # with its protobuf tag and length
_PAGE_BYTES = 16  # the rest of a PageUnits: tags, lengths and the page id

ServerContext = grpc.aio.ServicerContext[pb.ToWorker, pb.ToScheduler]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    worker_id: WorkerId
    advertise_address: str
    """host:port other processes reach this worker at."""
    role: Role = Role.BOTH
    min_prompt_tokens: int = 0
    max_prompt_tokens: int = 0
    shared_tier: SharedTier | None = None


class _PeerClosed(Exception):
    """The scheduler ended its side of the stream."""


class SchedulerSession:
    """From a granted Attach to the end of the stream."""

    def __init__(
        self, requests: AsyncIterator[pb.ToWorker], context: ServerContext, executor: Executor, *, fence: Fence
    ) -> None:
        self.fence = fence
        self._requests = requests
        self._context = context
        self._executor = executor
        self._channel = PlanChannel(self._deliver)
        self._reports: asyncio.Queue[WorkerReport] = asyncio.Queue(MAX_UNSENT_REPORTS)  # full → the session ends
        self._revoked: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()

    def revoke(self, reason: MeshError) -> None:
        """End the session from this side, with an error."""
        if not self._revoked.done():
            self._revoked.set_result(reason)

    async def run(self, identity: WorkerIdentity) -> None:
        """Serve until the scheduler closes. Raises the MeshError that ended the session otherwise."""
        # In the inbox before any plan can be, and at once: a predecessor's queued plans are gone now.
        opened = self._executor.open(self._channel)
        failures: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_plans())
                tasks.create_task(self._greet_and_write(opened, identity))
                tasks.create_task(self._until_revoked())
        except* _PeerClosed:
            pass
        except* MeshError as group:
            failures.extend(group.exceptions)
        finally:
            self._executor.close(self._channel)
        if failures:
            raise failures[0]

    def _deliver(self, report: WorkerReport) -> None:
        try:
            self._reports.put_nowait(report)
        except asyncio.QueueFull:
            self.revoke(Overloaded(f"{MAX_UNSENT_REPORTS} reports unsent: the scheduler does not read"))

    async def _read_plans(self) -> None:
        async for message in self._requests:
            if message.WhichOneof("body") != "plan":
                raise EntryMalformed("only plans may follow the first message, Attach")
            plan = decode_plan(message.plan)
            if plan.fence != self.fence:
                raise FenceLost(f"plan {plan.plan_id}: fence {plan.fence}, this session's is {self.fence}")
            await self._executor.submit(self._channel, plan)
        raise _PeerClosed

    async def _greet_and_write(self, opened: asyncio.Future[Snapshot], identity: WorkerIdentity) -> None:
        snapshot = await opened
        runner = self._executor.runner
        hello = WorkerInfo(
            worker_id=identity.worker_id,
            epoch=snapshot.epoch,
            role=identity.role,
            advertise_address=identity.advertise_address,
            model=runner.card,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            unit_tokens=UNIT_TOKENS,
            min_prompt_tokens=identity.min_prompt_tokens,
            max_prompt_tokens=identity.max_prompt_tokens,
            unit_bytes=0 if runner.kv is None else runner.kv.unit_bytes,
            host_id=host_id(),
            shared_tier=identity.shared_tier,
        )
        await self._context.write(pb.ToScheduler(hello=encode_hello(hello)))
        for residents in residents_messages(snapshot.residents, snapshot.tiers):
            await self._context.write(pb.ToScheduler(residents=residents))
        while True:
            report = await self._reports.get()
            await self._context.write(_message(report))
            if isinstance(report, StepReport) and report.failure is not None:
                raise StepFailed(report.failure)

    async def _until_revoked(self) -> None:
        raise await self._revoked


def _message(report: WorkerReport) -> pb.ToScheduler:
    match report:
        case StepReport():
            return pb.ToScheduler(report=encode_report(report))
        case PullReport():
            return pb.ToScheduler(pull_report=encode_pull_report(report))
        case TierUnits():
            return pb.ToScheduler(tier_units=encode_tier_units(report))
        case _:
            assert_never(report)


def residents_messages(
    pages: list[PageUnits], tiers: Sequence[TierUnits] = (), *, max_bytes: int = RESIDENTS_MESSAGE_BYTES
) -> Iterator[pb.Residents]:
    """Residents in messages of at most max_bytes; at least one, the last one marked."""
    tier_units = (max_bytes - 64) // _HASH_BYTES
    for held in tiers:
        for first in range(0, len(held.stored), tier_units):
            part = TierUnits(held.tier, held.stored[first : first + tier_units])
            yield encode_residents([], [part], last=False)
    batch: list[PageUnits] = []
    batch_bytes = 0
    for page in pages:
        page_bytes = _PAGE_BYTES + _HASH_BYTES * len(page.unit_hashes)
        if batch and batch_bytes + page_bytes > max_bytes - _PAGE_BYTES:
            yield encode_residents(batch, last=False)
            batch, batch_bytes = [], 0
        batch.append(page)
        batch_bytes += page_bytes
    yield encode_residents(batch, last=True)
