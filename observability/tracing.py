"""Tracing behind one small interface: OpenTelemetry when standard OTEL_ variables ask for it, else nothing.

Context travels as a W3C `traceparent` string (HTTP header, field of a Redis entry, field of a plan), never in
a context variable, because one request's spans are opened by three processes and many tasks. opentelemetry is
imported only when tracing is on; off, a span costs one small call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol, TypeAlias

AttributeValue: TypeAlias = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
SpanKind: TypeAlias = Literal["internal", "server", "client", "producer", "consumer"]


class Span(Protocol):
    """One timed piece of a request. Times are unix nanoseconds; omitted ones are now."""

    @property
    def traceparent(self) -> str:
        """What a child in another process names as its parent."""
        ...

    def set(self, attributes: Mapping[str, AttributeValue]) -> None: ...

    def event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, at_unix_ns: int | None = None
    ) -> None: ...

    def fail(self, message: str) -> None:
        """Mark the span as an error."""
        ...

    def end(self, at_unix_ns: int | None = None) -> None:
        """Close the span; what is done to it afterwards is ignored."""
        ...


class Tracer(Protocol):
    """Opens spans. Never raises and never blocks because of the collector."""

    @property
    def enabled(self) -> bool:
        """False: nothing is recorded, so a caller may skip building attributes."""
        ...

    def start_span(
        self,
        name: str,
        *,
        parent: str = "",
        kind: SpanKind = "internal",
        start_unix_ns: int | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        """Open a span under `parent`, a W3C traceparent; an empty or malformed one makes a new trace."""
        ...

    def shutdown(self) -> None:
        """Export what is buffered, for at most 2 s, then stop."""
        ...


class NullSpan:
    """Records nothing, but hands its parent's context on."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        pass

    def event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, at_unix_ns: int | None = None
    ) -> None:
        pass

    def fail(self, message: str) -> None:
        pass

    def end(self, at_unix_ns: int | None = None) -> None:
        pass


_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ROOTLESS = NullSpan("")


class NullTracer:
    """Tracing is off."""

    enabled = False

    def start_span(
        self,
        name: str,
        *,
        parent: str = "",
        kind: SpanKind = "internal",
        start_unix_ns: int | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> Span:
        # What a client sent travels on only if it is a traceparent: never 10 kB of header into every entry.
        return NullSpan(parent) if _TRACEPARENT.fullmatch(parent) else _ROOTLESS

    def shutdown(self) -> None:
        pass


def setup_tracing(service: str, environ: Mapping[str, str]) -> Tracer:
    """The process's tracer, named `phasemesh-<service>` unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES says.

    On when OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set and neither
    OTEL_SDK_DISABLED=true nor OTEL_TRACES_EXPORTER=none. These and the service name are taken from `environ`;
    the SDK reads its own other variables (sampler, headers, TLS, batching, limits) from the process.
    Raises ValueError naming the variable that asks for an exporter or a protocol other than OTLP over gRPC.
    """
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    exporter = environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if not endpoint or exporter == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return NullTracer()
    if exporter != "otlp":
        raise ValueError(f"OTEL_TRACES_EXPORTER={exporter!r}: otlp or none")
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environ.get(variable):
            if environ[variable] != "grpc":
                raise ValueError(f"{variable}={environ[variable]!r}: only grpc is spoken")
            break

    from observability.otel import OtelTracer  # here, so that a service without tracing never imports opentelemetry

    return OtelTracer(_service_name(service, environ), endpoint)


def _service_name(service: str, environ: Mapping[str, str]) -> str | None:
    """None: the SDK finds it in OTEL_RESOURCE_ATTRIBUTES."""
    if name := environ.get("OTEL_SERVICE_NAME"):
        return name
    if re.search(r"(^|,)\s*service\.name\s*=", environ.get("OTEL_RESOURCE_ATTRIBUTES", "")):
        return None
    return f"phasemesh-{service}"
