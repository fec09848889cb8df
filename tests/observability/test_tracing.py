"""Tracing on and off, against a real OTLP/gRPC receiver."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from observability import names
from observability.tracing import NullTracer, Tracer, setup_tracing
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
SHUTDOWN_LIMIT_S = 2.0


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


def tracer_for(receiver: OtlpReceiver, service: str = "gateway") -> Tracer:
    return setup_tracing(service, {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint})


def exported(receiver: OtlpReceiver, tracer: Tracer) -> dict[str, ReceivedSpan]:
    """Flush and return what arrived by name."""
    tracer.shutdown()
    return {span.name: span for span in receiver.spans}


# Off


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_EXPORTER": "otlp"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "True "},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_tracing_is_off_unless_the_standard_variables_ask_for_it(environ: dict[str, str]) -> None:
    tracer = setup_tracing("gateway", environ)
    assert isinstance(tracer, NullTracer)
    assert not tracer.enabled


def test_a_service_without_tracing_never_imports_opentelemetry() -> None:
    code = (
        "import sys; from observability.tracing import setup_tracing\n"
        "t = setup_tracing('gateway', {})\n"
        "s = t.start_span('queue'); s.set({'a': 1}); s.event('e'); s.fail('f'); s.end(); t.shutdown()\n"
        "assert not [m for m in sys.modules if m.startswith(('opentelemetry', 'grpc'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_disabled_tracer_hands_the_parent_on_and_shares_one_span_otherwise() -> None:
    tracer = NullTracer()
    assert tracer.start_span("queue", parent=PARENT).traceparent == PARENT
    assert tracer.start_span("a").traceparent == ""
    assert tracer.start_span("a") is tracer.start_span("b")


@pytest.mark.parametrize(
    "hostile",
    [
        "x" * 10_000,
        PARENT.upper(),
        f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-b7ad6b7169203331-01",
    ],
)
def test_a_malformed_parent_goes_no_further(hostile: str, receiver: OtlpReceiver) -> None:
    assert NullTracer().start_span("queue", parent=hostile).traceparent == ""
    tracer = tracer_for(receiver)
    tracer.start_span("queue", parent=hostile).end()
    assert exported(receiver, tracer)["queue"].parent_id == ""


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
    ],
)
def test_an_exporter_we_do_not_speak_is_refused_by_name(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}='{value}'"):
        setup_tracing("gateway", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", variable: value})


def test_the_protocol_of_traces_wins_over_the_common_one(receiver: OtlpReceiver) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": receiver.endpoint,
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    }
    tracer = setup_tracing("gateway", environ)
    tracer.start_span("queue").end()
    assert "queue" in exported(receiver, tracer)


# On


def test_a_span_arrives_whole(receiver: OtlpReceiver) -> None:
    tracer = tracer_for(receiver)
    start, middle, end = 1_700_000_000_000_000_001, 1_700_000_000_250_000_000, 1_700_000_001_000_000_007
    span = tracer.start_span(
        names.SPAN_DECODE,
        parent=PARENT,
        kind="consumer",
        start_unix_ns=start,
        attributes={names.REQUEST_ID: "r1", names.CHOICE: 0},
    )
    span.set({names.ROUTE_WORKERS: ["w0", "w1"], names.ROUTE_COSTS: [1.5, 2.0], names.RESUMED: True})
    span.event(names.EVENT_PREEMPTED, {names.WORKER_ID: "w0"}, middle)
    span.fail("worker lost")
    span.end(end)

    received = exported(receiver, tracer)["decode"]
    assert (received.trace_id, received.parent_id) == (TRACE_ID, "b7ad6b7169203331")
    assert received.traceparent == span.traceparent
    assert (received.kind, received.service, received.error) == ("consumer", "phasemesh-gateway", "worker lost")
    assert (received.start_unix_ns, received.end_unix_ns) == (start, end)
    assert received.attributes == {
        "phasemesh.request.id": "r1",
        "phasemesh.choice": 0,
        "phasemesh.route.workers": ["w0", "w1"],
        "phasemesh.route.costs": [1.5, 2.0],
        "phasemesh.resumed": True,
    }
    (event,) = received.events
    assert (event.name, event.at_unix_ns, event.attributes) == ("preempted", middle, {"phasemesh.worker.id": "w0"})


@pytest.mark.parametrize("kind", ["internal", "server", "client", "producer", "consumer"])
def test_every_kind_of_span_is_exported_as_such(kind: str, receiver: OtlpReceiver) -> None:
    tracer = tracer_for(receiver)
    tracer.start_span("s", kind=kind).end()  # type: ignore[arg-type]  # a parameter is not a Literal
    assert exported(receiver, tracer)["s"].kind == kind


def test_times_default_to_now(receiver: OtlpReceiver) -> None:
    tracer = tracer_for(receiver)
    before = time.time_ns()
    tracer.start_span("queue").end()
    span = exported(receiver, tracer)["queue"]
    assert before <= span.start_unix_ns <= span.end_unix_ns <= time.time_ns()


def test_one_trace_spans_three_services(receiver: OtlpReceiver) -> None:
    gateway, scheduler, worker = (tracer_for(receiver, s) for s in ("gateway", "scheduler", "gpu_worker"))
    root = gateway.start_span(names.request_span_name(names.OPERATION_CHAT, "smollm2"), kind="server")
    route = scheduler.start_span(names.SPAN_ROUTE, parent=root.traceparent)
    chunk = worker.start_span(names.SPAN_PREFILL_CHUNK, parent=route.traceparent)
    for span in (chunk, route, root):
        span.end()
    for tracer in (gateway, scheduler, worker):
        tracer.shutdown()

    spans = {s.name: s for s in receiver.spans}
    assert {s.trace_id for s in spans.values()} == {spans["chat smollm2"].trace_id}
    assert spans["chat smollm2"].parent_id == ""
    assert spans["route"].parent_id == spans["chat smollm2"].span_id
    assert spans["prefill_chunk"].parent_id == spans["route"].span_id
    assert spans["prefill_chunk"].service == "phasemesh-gpu_worker"


def test_the_service_name_and_resource_follow_the_standard_variables(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resource_with(**variables: str) -> dict[str, object]:
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
            tracer = setup_tracing("gateway", os.environ)
            tracer.start_span("s").end()
            tracer.shutdown()
        return receiver.spans[-1].resource

    assert resource_with()["service.name"] == "phasemesh-gateway"
    assert resource_with(OTEL_SERVICE_NAME="edge")["service.name"] == "edge"
    named = resource_with(OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test, service.name=front")
    assert (named["service.name"], named["deployment.environment"]) == ("front", "test")
    both = resource_with(OTEL_RESOURCE_ATTRIBUTES="service.name=front", OTEL_SERVICE_NAME="edge")
    assert both["service.name"] == "edge"
    unnamed = resource_with(OTEL_RESOURCE_ATTRIBUTES="deployment.environment=test")
    assert (unnamed["service.name"], unnamed["deployment.environment"]) == ("phasemesh-gateway", "test")


def test_an_unsampled_trace_is_not_exported_but_still_propagates(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_parent = tracer_for(receiver)
    span = by_parent.start_span("queue", parent=PARENT[:-2] + "00")
    assert re.fullmatch(rf"00-{TRACE_ID}-[0-9a-f]{{16}}-00", span.traceparent)
    span.end()
    assert exported(receiver, by_parent) == {}

    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    by_variable = tracer_for(receiver)
    span = by_variable.start_span("queue", parent=PARENT)
    assert span.traceparent.startswith(f"00-{TRACE_ID}-") and span.traceparent.endswith("-00")
    span.end()
    assert exported(receiver, by_variable) == {}


def test_a_process_that_only_has_the_variables_exports_in_the_background(receiver: OtlpReceiver) -> None:
    """OTEL_BSP_SCHEDULE_DELAY is honoured: spans arrive while the process still runs."""
    code = (
        "import os, sys; from observability.tracing import setup_tracing\n"
        "setup_tracing('scheduler', os.environ).start_span('queue').end()\n"
        "print('ended', flush=True); sys.stdin.read()"
    )
    environ = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "20"}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        spans = receiver.wait(lambda spans: spans, timeout_s=20)
        assert process.poll() is None
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert [(s.service, s.name) for s in spans] == [("phasemesh-scheduler", "queue")]


# A collector that is away


def test_an_absent_collector_neither_blocks_nor_floods_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, never listening: every connection is refused
        tracer = setup_tracing(
            "gateway", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        )
        started = time.monotonic()
        for _ in range(2_000):
            tracer.start_span("queue").end()
        assert time.monotonic() - started < 2.0
        started = time.monotonic()
        tracer.shutdown()
        assert time.monotonic() - started < SHUTDOWN_LIMIT_S
    sdk_records = [r for r in caplog.records if r.name.startswith("opentelemetry")]
    assert 1 <= len(sdk_records) <= 10
    assert all(r.levelno >= logging.WARNING for r in sdk_records)


def test_a_collector_that_never_answers_does_not_hold_up_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = setup_tracing(
            "gateway", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        )
        tracer.start_span("queue").end()
        started = time.monotonic()
        tracer.shutdown()
        assert time.monotonic() - started < SHUTDOWN_LIMIT_S
    assert "did not take the last spans" in caplog.text


def test_a_collector_that_comes_late_still_gets_the_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    export_failed = threading.Event()

    class FailureSeen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            export_failed.set()

    monkeypatch.setattr(logging.getLogger(), "handlers", [FailureSeen(logging.WARNING)])
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        tracer = setup_tracing("gateway", {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"})
        tracer.start_span("early").end()
        assert export_failed.wait(10)
    with OtlpReceiver(port) as receiver:
        spans = receiver.wait(lambda spans: spans, timeout_s=15)
        tracer.shutdown()
    assert [s.name for s in spans] == ["early"]


def test_a_span_used_after_its_end_or_after_shutdown_is_harmless(receiver: OtlpReceiver) -> None:
    tracer = tracer_for(receiver)
    span = tracer.start_span("queue")
    span.end()
    span.set({"a": 1})
    span.event("late")
    span.end()
    tracer.shutdown()
    tracer.shutdown()
    tracer.start_span("after").end()
    assert [s.name for s in receiver.spans] == ["queue"]


def test_gen_ai_attribute_names_are_the_conventions_own() -> None:
    ours = {name: value for name, value in vars(names).items() if name.startswith("GEN_AI_")}
    assert len(ours) > 10
    assert ours == {name: getattr(gen_ai_attributes, name) for name in ours}
