"""A real OTLP/gRPC trace collector for tests: what a service exports ends up here as plain records.

    with OtlpReceiver() as receiver:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}
        …
        spans = await receiver.wait_for(lambda spans: any(s.name == "decode" for s in spans))

It serves on threads of its own, so a tracer that flushes inside the test's event loop is still answered.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

_KINDS = {
    trace_pb2.Span.SPAN_KIND_INTERNAL: "internal",
    trace_pb2.Span.SPAN_KIND_SERVER: "server",
    trace_pb2.Span.SPAN_KIND_CLIENT: "client",
    trace_pb2.Span.SPAN_KIND_PRODUCER: "producer",
    trace_pb2.Span.SPAN_KIND_CONSUMER: "consumer",
}


@dataclass(frozen=True, slots=True)
class ReceivedEvent:
    name: str
    at_unix_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One exported span. Ids are lower-case hex; parent_id is "" for a root."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    service: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: dict[str, Any]
    events: tuple[ReceivedEvent, ...]
    error: str | None
    """Message of an error status."""
    resource: dict[str, Any]

    @property
    def traceparent(self) -> str:
        """What a child of this span was given as its parent."""
        return f"00-{self.trace_id}-{self.span_id}-01"


class OtlpReceiver(pb_grpc.TraceServiceServicer):  # type: ignore[misc]  # generated class, untyped
    """Context manager; `endpoint` is valid inside it. port 0 picks a free one."""

    def __init__(self, port: int = 0) -> None:
        self._requested_port = port
        self._arrived = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self._server = grpc.server(ThreadPoolExecutor(max_workers=2, thread_name_prefix="otlp-receiver"))
        pb_grpc.add_TraceServiceServicer_to_server(self, self._server)

    def __enter__(self) -> OtlpReceiver:
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self._requested_port}")
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait(5)

    @property
    def endpoint(self) -> str:
        """Value for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Every span so far, in the order of arrival."""
        with self._arrived:
            return list(self._spans)

    def wait(self, enough: Callable[[list[ReceivedSpan]], object], timeout_s: float = 10.0) -> list[ReceivedSpan]:
        """Block until enough(spans) is true, then return them; raises TimeoutError listing what did arrive."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: enough(self._spans), timeout_s):
                raise TimeoutError(f"after {timeout_s} s only {[(s.service, s.name) for s in self._spans]}")
            return list(self._spans)

    async def wait_for(
        self, enough: Callable[[list[ReceivedSpan]], object], timeout_s: float = 10.0
    ) -> list[ReceivedSpan]:
        """`wait` for a test on an event loop."""
        return await asyncio.to_thread(self.wait, enough, timeout_s)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        """The collector's one method (TraceService)."""
        received = [
            _span(span, _attributes(group.resource.attributes))
            for group in request.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans += received
            self._arrived.notify_all()
        return pb.ExportTraceServiceResponse()


def _span(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return ReceivedSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        kind=_KINDS[span.kind],
        service=resource["service.name"],
        start_unix_ns=span.start_time_unix_nano,
        end_unix_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        events=tuple(ReceivedEvent(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in span.events),
        error=span.status.message if failed else None,
        resource=resource,
    )


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    """AnyValue → Python; an array becomes a list."""
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(v) for v in value.array_value.values]
    return getattr(value, which)
