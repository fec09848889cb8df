"""The tracer that exports: opentelemetry-sdk, batched OTLP over gRPC. Imported by observability.tracing when on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from observability.tracing import AttributeValue, Span, SpanKind

log = logging.getLogger(__name__)

FLUSH_S = 1.5
"""How long shutdown waits for the buffered spans to leave."""
LOG_INTERVAL_S = 60.0
"""An outage of the collector is reported this often."""

_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "server": trace.SpanKind.SERVER,
    "client": trace.SpanKind.CLIENT,
    "producer": trace.SpanKind.PRODUCER,
    "consumer": trace.SpanKind.CONSUMER,
}
_W3C = TraceContextTextMapPropagator()


class OtelSpan:
    """observability.tracing.Span over an SDK span."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        c = span.get_span_context()
        self.traceparent = f"00-{c.trace_id:032x}-{c.span_id:016x}-{c.trace_flags:02x}"

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.set_attributes(attributes)

    def event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, at_unix_ns: int | None = None
    ) -> None:
        self._span.add_event(name, attributes, at_unix_ns)

    def fail(self, message: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, message)

    def end(self, at_unix_ns: int | None = None) -> None:
        self._span.end(at_unix_ns)


class OtelTracer:
    """observability.tracing.Tracer over an SDK provider of its own (no global is set).

    Ended spans go to a bounded queue (OTEL_BSP_MAX_QUEUE_SIZE; the oldest is dropped when full) that one thread
    exports, so a slow or absent collector costs the service nothing.
    """

    enabled = True

    def __init__(self, service_name: str | None, endpoint: str) -> None:
        """service_name None leaves the name to OTEL_RESOURCE_ATTRIBUTES; endpoint is http(s)://host:port."""
        _quiet_sdk_logs()
        resource = Resource.create({SERVICE_NAME: service_name} if service_name else {})
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("phasemesh")

    def start_span(
        self,
        name: str,
        *,
        parent: str = "",
        kind: SpanKind = "internal",
        start_unix_ns: int | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        context = _W3C.extract({"traceparent": parent})  # empty when malformed: a new trace
        return OtelSpan(self._tracer.start_span(name, context, _KINDS[kind], attributes, start_time=start_unix_ns))

    def shutdown(self) -> None:
        flush = threading.Thread(target=self._provider.shutdown, name="trace-flush", daemon=True)
        flush.start()
        flush.join(FLUSH_S)
        if flush.is_alive():
            log.warning("the trace collector did not take the last spans within %s s; dropped", FLUSH_S)
            self._exporter.shutdown()  # closes the channel: the running export and its retries end at once
            flush.join(0.3)


class _RateLimited(logging.Handler):
    """Hands the first record of each log statement in LOG_INTERVAL_S to the root logger and drops the rest."""

    def __init__(self) -> None:
        super().__init__()
        self._next_at: dict[tuple[str, int], float] = {}  # bounded by the log statements in the SDK

    def emit(self, record: logging.LogRecord) -> None:
        statement, now = (record.pathname, record.lineno), time.monotonic()
        if now >= self._next_at.get(statement, 0.0):
            self._next_at[statement] = now + LOG_INTERVAL_S
            logging.getLogger().handle(record)


def _quiet_sdk_logs() -> None:
    """The SDK reports every failed batch; a collector that is away for an hour must not fill the log."""
    sdk = logging.getLogger("opentelemetry")
    sdk.propagate = False
    sdk.handlers = [_RateLimited()]
