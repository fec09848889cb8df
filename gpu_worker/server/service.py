"""The Worker service: who may open a session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from gpu_worker.executor import Executor
from gpu_worker.grpc_status import status_of
from gpu_worker.server.session import SchedulerSession, ServerContext, WorkerIdentity, residents_messages
from gpu_worker.transfer.rpc import add_source
from gpu_worker.transfer.source import TransferSource
from observability import names
from observability.tracing import Span, Tracer
from wire import worker_pb2 as pb
from wire import worker_pb2_grpc as pb_grpc
from wire.errors import ConfigInvalid, EntryMalformed, FenceLost, MeshError, Unavailable
from wire.ids import Fence

log = logging.getLogger("gpu_worker.server")

ATTACH_TIMEOUT_S = 5.0
"""A stream's first message must come this soon."""
STOP_GRACE_S = 1.0
MAX_MESSAGE_BYTES = 64 << 20
LIST_MESSAGE_BYTES = 64 << 10
"""Of a list of units: less than a millisecond of either event loop."""

ListContext = grpc.aio.ServicerContext[pb.ListUnitsRequest, pb.Residents]

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A peer that is gone without a FIN is noticed in two seconds: a ping each second, a second to answer it. An
    # unanswered ping of a live stream is judged by ping_timeout_ms (default: a minute), not by keepalive_timeout_ms.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Schedulers may ping as often.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.so_reuseport", 0),  # a second worker on the port is an error, not a silent sharer
)


class WorkerService(pb_grpc.WorkerServicer):
    """At most one live session; an Attach with a higher fence takes over from it, any other is refused."""

    def __init__(self, executor: Executor, identity: WorkerIdentity, tracer: Tracer) -> None:
        self._executor = executor
        self._identity = identity
        self._tracer = tracer
        self._live: SchedulerSession | None = None
        self._draining = False

    def drain(self) -> None:
        """End the live session and refuse new ones: the worker is about to stop."""
        self._draining = True
        if self._live is not None:
            self._live.revoke(Unavailable("the worker is stopping"))

    async def Session(  # type: ignore[override]  # grpc.aio takes a coroutine too; its stubs know generators only
        self, request_iterator: AsyncIterator[pb.ToWorker], context: ServerContext
    ) -> None:
        try:
            attach = await _read_attach(request_iterator)
            session = self._admit(attach, request_iterator, context)
            await self._serve(session, attach, context)
        except MeshError as error:
            log.warning("session ended", extra={"peer": context.peer(), "code": error.code, "reason": error.message})
            await context.abort(status_of(error), error.message)

    async def ListUnits(  # type: ignore[override]
        self, request: pb.ListUnitsRequest, context: ListContext
    ) -> None:
        residents = await asyncio.to_thread(self._executor.residents)
        epoch = self._executor.epoch
        if request.epoch != epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {request.epoch}: it is {epoch} here")
        for message in residents_messages(residents.pages, residents.tiers, max_bytes=LIST_MESSAGE_BYTES):
            await context.write(message)

    def _admit(
        self, attach: pb.Attach, requests: AsyncIterator[pb.ToWorker], context: ServerContext
    ) -> SchedulerSession:
        if self._draining:
            raise Unavailable("the worker is stopping")
        if self._live is not None:
            if attach.fence <= self._live.fence:
                raise FenceLost(f"fence {attach.fence}: a session with fence {self._live.fence} is live")
            self._live.revoke(FenceLost(f"fence {self._live.fence}: taken over by fence {attach.fence}"))
        self._live = SchedulerSession(requests, context, self._executor, fence=Fence(attach.fence))
        return self._live

    async def _serve(self, session: SchedulerSession, attach: pb.Attach, context: ServerContext) -> None:
        span = self._session_span(attach, context)
        log.info("session open", extra={"fence": attach.fence, "scheduler": attach.scheduler_id})
        try:
            await session.run(self._identity)
        except MeshError as error:
            span.fail(error.message)
            raise
        finally:
            span.end()
            if self._live is session:
                self._live = None
        log.info("session closed by its scheduler", extra={"fence": attach.fence})

    def _session_span(self, attach: pb.Attach, context: ServerContext) -> Span:
        metadata = dict(context.invocation_metadata() or ())
        return self._tracer.start_span(
            names.SPAN_WORKER_SESSION,
            parent=str(metadata.get("traceparent", "")),
            kind="server",
            attributes={
                names.WORKER_ID: self._identity.worker_id,
                names.SCHEDULER_ID: attach.scheduler_id,
                names.FENCE: attach.fence,
            },
        )


async def _read_attach(requests: AsyncIterator[pb.ToWorker]) -> pb.Attach:
    try:
        async with asyncio.timeout(ATTACH_TIMEOUT_S):
            first = await anext(requests, None)
    except TimeoutError as error:
        raise EntryMalformed(f"no Attach within {ATTACH_TIMEOUT_S} s") from error
    if first is None or first.WhichOneof("body") != "attach":
        raise EntryMalformed("the first message must be Attach")
    return first.attach


def bind_server(host: str, port: int) -> tuple[grpc.aio.Server, int]:
    """A server and the port it bound (0 picks a free one). Raises ConfigInvalid when the port is taken."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigInvalid(
            f"PHASEMESH_WORKER_PORT: cannot listen on {address}", param="PHASEMESH_WORKER_PORT"
        ) from error
    return server, bound


@asynccontextmanager
async def serving(
    server: grpc.aio.Server, service: WorkerService, source: TransferSource | None = None
) -> AsyncIterator[None]:
    """Serve until the block ends; then end the live session with UNAVAILABLE. source: gives KV to other workers."""
    pb_grpc.add_WorkerServicer_to_server(service, server)
    if source is not None:
        add_source(source, server)
    await server.start()
    try:
        yield
    finally:
        service.drain()
        await server.stop(STOP_GRACE_S)
