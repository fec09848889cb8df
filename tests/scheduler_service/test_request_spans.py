from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from observability import names
from observability.tracing import AttributeValue, NullTracer, SpanKind
from scheduler.commands import Admission, RouteCandidate, Timeline, Transfer
from scheduler.request_spans import RequestSpans
from tests.scheduler_service.parts import CELL, request_entry
from wire.entries import RequestStats, TerminalReply
from wire.ids import RequestId, WorkerId
from wire.plan import Role

PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@dataclass
class RecordedSpan:
    name: str
    parent: str
    traceparent: str
    start_unix_ns: int | None
    attributes: dict[str, AttributeValue]
    events: list[tuple[str, int | None]] = field(default_factory=list)
    failure: str | None = None
    end_unix_ns: int | None = None
    ended: bool = False

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        self.attributes.update(attributes)

    def event(
        self, name: str, attributes: Mapping[str, AttributeValue] | None = None, at_unix_ns: int | None = None
    ) -> None:
        self.events.append((name, at_unix_ns))

    def fail(self, message: str) -> None:
        self.failure = message

    def end(self, at_unix_ns: int | None = None) -> None:
        self.ended, self.end_unix_ns = True, at_unix_ns


class RecordingTracer:
    enabled = True

    def __init__(self) -> None:
        self.spans: list[RecordedSpan] = []

    def start_span(
        self,
        name: str,
        *,
        parent: str = "",
        kind: SpanKind = "internal",
        start_unix_ns: int | None = None,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> RecordedSpan:
        traceparent = f"00-{'a' * 32}-{len(self.spans) + 1:016x}-01"
        span = RecordedSpan(name, parent, traceparent, start_unix_ns, dict(attributes or {}))
        self.spans.append(span)
        return span

    def shutdown(self) -> None:
        pass


def candidate(worker_id: str, cost: float) -> RouteCandidate:
    return RouteCandidate(WorkerId(worker_id), cost, 0.0, 0.0, 0.0)


def timeline() -> Timeline:
    candidates = (candidate("w1", 10.0), candidate("w2", 20.0))
    return Timeline(
        arrived_s=100.0,
        admissions=[
            Admission(0, 100.0, 101.0, WorkerId("w1"), 16, candidates, resumed=False),
            Admission(0, 103.0, 104.0, WorkerId("w2"), 0, candidates[1:], resumed=True),
        ],
        preempted_s=[102.0],
        worker_lost_s=[103.0],
        first_token_s=101.5,
        finished_s=105.0,
    )


def test_a_request_is_one_span_from_arrival_to_terminal_with_its_queue_and_route_below() -> None:
    tracer = RecordingTracer()
    spans = RequestSpans(tracer, CELL)
    traceparent = spans.open(request_entry("r", traceparent=PARENT), 100.0)
    stats = RequestStats(output_tokens=7, cached_tokens=16, preemptions=1)
    spans.finish(TerminalReply(RequestId("r"), stats=stats), timeline())

    request, *children = tracer.spans
    assert (request.name, request.parent, request.start_unix_ns) == (names.SPAN_SCHEDULE, PARENT, 100 * 10**9)
    assert traceparent == request.traceparent and request.end_unix_ns == 105 * 10**9
    assert request.events == [
        (names.EVENT_PREEMPTED, 102 * 10**9),
        (names.EVENT_WORKER_LOST, 103 * 10**9),
        (names.EVENT_FIRST_TOKEN, 101_500_000_000),
    ]
    assert request.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 7 and request.failure is None
    assert [child.name for child in children] == [names.SPAN_QUEUE, names.SPAN_ROUTE] * 2
    assert all(child.parent == request.traceparent and child.ended for child in children)
    queue, route, _, rerouted = children
    assert (queue.start_unix_ns, queue.end_unix_ns) == (100 * 10**9, 101 * 10**9)
    assert route.attributes[names.ROUTE_WORKERS] == ["w1", "w2"]
    assert route.attributes[names.ROUTE_COSTS] == [10.0, 20.0]
    assert rerouted.attributes[names.RESUMED] is True


W1, W2 = WorkerId("w1"), WorkerId("w2")


def drawn(told: Timeline, stats: RequestStats | None = None) -> dict[str, RecordedSpan]:
    """The spans of one finished request, by name."""
    tracer = RecordingTracer()
    spans = RequestSpans(tracer, CELL)
    spans.open(request_entry("r"), told.arrived_s)
    spans.finish(TerminalReply(RequestId("r"), stats=stats or RequestStats()), told)
    return {span.name: span for span in tracer.spans}


def test_a_route_shows_every_term_of_every_candidate_and_what_the_prediction_became() -> None:
    candidates = (
        RouteCandidate(W1, 64.0, 32.0, 3.0, 2.0, 512.0, 40.0, "w2", 0.8, 0.1, disturbed_decodes=7.0),
        RouteCandidate(W2, 16.0, 900.0, 0.0, 5.0),
    )
    admission = Admission(
        0, 100.0, 101.0, W1, 16, candidates, False, 512, W2, predicted_cached_tokens=48, role=Role.DECODE
    )
    route = drawn(Timeline(100.0, [admission]))[names.SPAN_ROUTE].attributes
    assert {name: route[name] for name in route if name.startswith("phasemesh.route.")} == {
        names.ROUTE_WORKERS: ["w1", "w2"],
        names.ROUTE_COSTS: [148.0, 921.0],
        names.ROUTE_UNCACHED_TOKENS: [64.0, 16.0],
        names.ROUTE_QUEUED_TOKENS: [32.0, 900.0],
        names.ROUTE_KV_PRESSURE: [3.0, 0.0],
        names.ROUTE_ACTIVE_DECODES: [2.0, 5.0],
        names.ROUTE_PULL_COSTS: [40.0, 0.0],
        names.ROUTE_DISTURBED_DECODES: [7.0, 0.0],
        names.ROUTE_PULLED_TOKENS: [512.0, 0.0],
        names.ROUTE_PULL_SOURCES: ["w2", ""],
        names.ROUTE_PREDICTED_PREFILL_S: [0.8, 0.0],
        names.ROUTE_PREDICTED_PULL_S: [0.1, 0.0],
    }
    assert (route[names.CACHED_TOKENS], route[names.PREDICTED_CACHED_TOKENS]) == (16, 48)
    assert (route[names.PULLED_TOKENS], route[names.PULL_SOURCE], route[names.ROLE]) == (512, "w2", "decode")


def test_the_terms_of_a_cost_add_up_to_it() -> None:
    candidates = (RouteCandidate(W1, 1.0, 2.0, 4.0, 8.0, pull_cost_tokens=16.0, disturbed_decodes=32.0),)
    admission = Admission(0, 100.0, 101.0, W1, 16, candidates, resumed=False)
    route = drawn(Timeline(100.0, [admission]))[names.SPAN_ROUTE].attributes
    terms = (
        names.ROUTE_UNCACHED_TOKENS,
        names.ROUTE_QUEUED_TOKENS,
        names.ROUTE_KV_PRESSURE,
        names.ROUTE_ACTIVE_DECODES,
        names.ROUTE_PULL_COSTS,
        names.ROUTE_DISTURBED_DECODES,
    )
    assert sorted(route[term] for term in terms) == [[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]]  # type: ignore[type-var]
    assert route[names.ROUTE_COSTS] == [63.0]
    assert names.PULL_SOURCE not in route


def test_a_transfer_is_a_span_of_its_own_and_fails_with_its_reason() -> None:
    came = Transfer(1, 101.0, 101.5, W2, W1, 8, 4096, "shm", is_handoff=True)
    told = Timeline(100.0, transfers=[came])
    span = drawn(told, RequestStats(transfer_s=0.5))[names.SPAN_KV_TRANSFER]
    assert (span.start_unix_ns, span.end_unix_ns, span.failure) == (101 * 10**9, 101_500_000_000, None)
    assert span.attributes == {
        names.CHOICE: 1,
        names.TRANSFER_SOURCE: "w2",
        names.TRANSFER_TARGET: "w1",
        names.TRANSFER_TOKENS: 128,
        names.TRANSFER_BYTES: 4096,
        names.TRANSFER_TRANSPORT: "shm",
        names.TRANSFER_HANDOFF: True,
    }
    assert drawn(told, RequestStats(transfer_s=0.5))[names.SPAN_SCHEDULE].attributes[names.TRANSFER_SECONDS] == 0.5
    cut_off = Transfer(0, 101.0, 101.5, W2, W1, 0, 0, "grpc", failure="the source is gone")
    assert drawn(Timeline(100.0, transfers=[cut_off]))[names.SPAN_KV_TRANSFER].failure == "the source is gone"


def test_an_error_fails_the_span_with_its_code() -> None:
    tracer = RecordingTracer()
    spans = RequestSpans(tracer, CELL)
    spans.open(request_entry("r"), 100.0)
    spans.finish(TerminalReply(RequestId("r"), error_code="worker_lost", error_message="gone"), None)
    [span] = tracer.spans
    assert span.ended and span.failure == "gone" and span.attributes[names.ERROR_TYPE] == "worker_lost"


def test_a_lost_fence_ends_what_is_open_and_the_rest_is_harmless() -> None:
    tracer = RecordingTracer()
    spans = RequestSpans(tracer, CELL)
    spans.open(request_entry("r"), 100.0)
    spans.abandon("fence lost")
    spans.finish(TerminalReply(RequestId("r")), timeline())
    [span] = tracer.spans
    assert span.ended and span.failure == "fence lost"


def test_without_tracing_the_gateways_context_goes_on_to_the_worker() -> None:
    spans = RequestSpans(NullTracer(), CELL)
    assert spans.open(request_entry("r", traceparent=PARENT), 100.0) == PARENT
    spans.finish(TerminalReply(RequestId("r")), timeline())
