"""One worker's gRPC session, kept open for as long as the worker is registered (wire/worker.proto).

connect ─▸ Attach ─▸ Hello, Residents… ─▸ WorkerUp ─▸ plans out, reports in ─▸ break ─▸ WorkerDown ─▸ connect …
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import grpc

from observability import names
from observability.tracing import Tracer
from scheduler.events import Event, PullReported, StepReported, TierChanged, WorkerDown, WorkerUp
from wire import worker_pb2 as pb
from wire.entries import WorkerEntry
from wire.errors import EntryMalformed
from wire.ids import Epoch, Fence
from wire.plan import Residents, StepPlan, WorkerInfo
from wire.worker_codec import (
    decode_hello,
    decode_pull_report,
    decode_report,
    decode_residents,
    decode_tier_units,
    encode_plan,
)
from wire.worker_pb2_grpc import WorkerStub

log = logging.getLogger(__name__)

MAX_UNSENT_PLANS: Final = 256
"""A worker this far behind is not reading: its session ends."""
GREETING_TIMEOUT_S: Final = 30.0
"""A worker finishes its running step before it says Hello."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 1.0
KEEPALIVE_MS: Final = 900
"""A ping after this much silence, and as long for its answer: a frozen or cut-off worker is noticed within 2 s."""
MAX_MESSAGE_BYTES: Final = 64 << 20

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),  # without it a lost ping is noticed after a minute
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    # Every session has a connection of its own: none inherits an earlier one's backoff.
    ("grpc.use_local_subchannel_pool", 1),
)

Call: TypeAlias = "grpc.aio.StreamStreamCall[pb.ToWorker, pb.ToScheduler]"


class LinkOwner(Protocol):
    """What a link needs to know and must tell."""

    fence: Fence
    scheduler_id: str
    inbox: asyncio.Queue[Event]
    tracer: Tracer

    def refusal(self, info: WorkerInfo) -> str | None:
        """Why this worker may not serve in the cell."""
        ...

    async def worker_up(self, event: WorkerUp) -> None:
        """It may: told at once after refusal() said so, before anything else runs."""
        ...

    async def fence_doubted(self) -> None:
        """A worker refused our fence. Raises FenceLost if it is right."""
        ...


class _SessionEnded(Exception):
    """The session is over, for this reason; the link goes on."""


class WorkerLink:
    def __init__(self, entry: WorkerEntry, owner: LinkOwner) -> None:
        self._entry = entry
        self._owner = owner
        self._registered = True
        self._changed = asyncio.Event()  # the registry says something new, or we give the session up
        self._broken: str | None = None
        self._plans: asyncio.Queue[pb.ToWorker] = asyncio.Queue(MAX_UNSENT_PLANS)
        self.epoch: Epoch | None = None
        """Of the session that is open."""

    @property
    def address(self) -> str:
        return self._entry.address

    # -- what the registry and the service say -----------------------------------------------------------------

    def follow(self, entry: WorkerEntry | None) -> None:
        """Take the worker's registration; None when it has none. An open session outlives its registration, but
        not the news that the worker lives elsewhere."""
        self._registered = entry is not None
        if entry is None or entry == self._entry:
            return
        if entry.address != self._entry.address or (self.epoch is not None and entry.epoch > self.epoch):
            self._break(f"the worker is now at {entry.address}, epoch {entry.epoch}")
        self._entry = entry

    def send(self, plan: StepPlan) -> None:
        """Queue a plan. Full: the worker does not read, and its session ends."""
        try:
            self._plans.put_nowait(pb.ToWorker(plan=encode_plan(plan)))
        except asyncio.QueueFull:
            self._break(f"{MAX_UNSENT_PLANS} plans unsent: the worker does not read")

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._changed.set()

    # -- the link's task ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Session after session, until the worker is neither connected nor registered. Raises FenceLost."""
        pause_s = 0.0
        last_reason = ""
        while self._registered:
            self._broken = None
            self._changed.clear()
            reason, was_open = await self._session()
            if was_open or reason != last_reason:
                log.warning("worker session ended: %s", reason, extra={"worker": self._entry.worker_id})
            last_reason = reason
            pause_s = FIRST_PAUSE_S if was_open else min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
            await asyncio.sleep(pause_s)

    async def _session(self) -> tuple[str, bool]:
        """One session, from connecting to its end; returns why it ended, and whether it had been open."""
        span = self._owner.tracer.start_span(
            names.SPAN_WORKER_SESSION, kind="client", attributes={names.WORKER_ID: self._entry.worker_id}
        )
        metadata = (("traceparent", span.traceparent),) if span.traceparent else ()
        info: WorkerInfo | None = None
        reason = ""
        async with grpc.aio.insecure_channel(self._entry.address, options=CHANNEL_OPTIONS) as channel:
            call = WorkerStub(channel).Session(metadata=metadata)
            try:
                info, residents = await self._greet(call)
                self._plans = asyncio.Queue(MAX_UNSENT_PLANS)
                self.epoch = info.epoch
                await self._owner.worker_up(WorkerUp(info, residents.pages, residents.tiers))
                await self._exchange(call, info)
            except _SessionEnded as ended:
                reason = str(ended)
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    await self._owner.fence_doubted()
            finally:
                self.epoch = None
                call.cancel()
                span.end()
        if info is not None:
            await self._owner.inbox.put(WorkerDown(info.worker_id, info.epoch, reason))
        return reason, info is not None

    async def _greet(self, call: Call) -> tuple[WorkerInfo, Residents]:
        """Attach; returns what the worker is and which units it kept. Raises _SessionEnded or AioRpcError."""
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                attach = pb.Attach(fence=self._owner.fence, scheduler_id=self._owner.scheduler_id)
                await _write(call, pb.ToWorker(attach=attach))
                info = decode_hello((await _read(call, "hello")).hello)
                if info.worker_id != self._entry.worker_id:
                    raise _SessionEnded(f"{self._entry.address} is worker {info.worker_id!r}")
                residents = Residents()
                last = False
                while not last:
                    message = await _read(call, "residents")
                    part = decode_residents(message.residents)
                    residents.pages += part.pages
                    residents.tiers += part.tiers
                    last = message.residents.last
        except TimeoutError as error:
            raise _SessionEnded(f"no Hello within {GREETING_TIMEOUT_S:g} s") from error
        except EntryMalformed as error:
            raise _SessionEnded(error.message) from error
        if refusal := self._owner.refusal(info):
            raise _SessionEnded(refusal)
        return info, residents

    async def _exchange(self, call: Call, info: WorkerInfo) -> None:
        """Plans out and reports in until the stream ends. Always raises: _SessionEnded or AioRpcError."""
        async with asyncio.TaskGroup() as group:
            jobs = (self._read_reports(call, info), self._write_plans(call), self._until_broken())
            # None of them raises: a group that fails while it is being cancelled forgets the cancellation.
            tasks = [group.create_task(_ending(job)) for job in jobs]
            done, running = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in running:
                task.cancel()
        raise next(task.result() for task in tasks if task in done)

    async def _read_reports(self, call: Call, info: WorkerInfo) -> NoReturn:
        while True:
            message = await _read(call, "report", "pull_report", "tier_units")
            try:
                event = _event(info, message)
            except EntryMalformed as error:
                raise _SessionEnded(error.message) from error
            await self._owner.inbox.put(event)

    async def _write_plans(self, call: Call) -> NoReturn:
        while True:
            await _write(call, await self._plans.get())

    async def _until_broken(self) -> NoReturn:
        await self._changed.wait()
        raise _SessionEnded(self._broken or "given up")


async def _ending(job: Coroutine[Any, Any, NoReturn]) -> Exception:
    """How a job that only ends by raising ended."""
    try:
        await job
    except (_SessionEnded, grpc.aio.AioRpcError) as error:
        return error


async def _write(call: Call, message: pb.ToWorker) -> None:
    """Raises AioRpcError, or _SessionEnded once the call is over: the reader then knows more."""
    try:
        await call.write(message)
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
        raise _SessionEnded("the worker closed the stream") from error


def _event(info: WorkerInfo, message: pb.ToScheduler) -> Event:
    """What an open session's message says. Raises EntryMalformed."""
    match message.WhichOneof("body"):
        case "pull_report":
            return PullReported(info.worker_id, info.epoch, decode_pull_report(message.pull_report))
        case "tier_units":
            return TierChanged(info.worker_id, info.epoch, decode_tier_units(message.tier_units))
        case _:
            return StepReported(info.worker_id, info.epoch, decode_report(message.report))


async def _read(call: Call, *bodies: str) -> pb.ToScheduler:
    """The next message, which must be one of these."""
    message = await call.read()
    if not isinstance(message, pb.ToScheduler):  # grpc.aio.EOF
        raise _SessionEnded("the worker closed the stream")
    if message.WhichOneof("body") not in bodies:
        raise _SessionEnded(f"expected {' or '.join(bodies)}, got {message.WhichOneof('body')}")
    return message
