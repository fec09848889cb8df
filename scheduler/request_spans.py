"""The scheduler's part of each request's trace: one span from arrival to terminal, with queue and route below it."""

from __future__ import annotations

from typing import Final

from observability import names
from observability.tracing import AttributeValue, Span, Tracer
from scheduler.clock import unix_ns
from scheduler.commands import Admission, RouteCandidate, Timeline, Transfer
from wire.entries import RequestEntry, TerminalReply
from wire.ids import UNIT_TOKENS, RequestId

MAX_ROUTE_CANDIDATES: Final = 16


class RequestSpans:
    """Open spans of live requests. Costs one small call per request when tracing is off."""

    def __init__(self, tracer: Tracer, cell: str) -> None:
        self._tracer = tracer
        self._cell = cell
        self._open: dict[RequestId, Span] = {}

    def open(self, entry: RequestEntry, arrived_s: float) -> str:
        """Begin a request's span under the gateway's; returns the traceparent that workers go under."""
        if not self._tracer.enabled:
            return entry.traceparent
        span = self._tracer.start_span(
            names.SPAN_SCHEDULE,
            parent=entry.traceparent,
            kind="consumer",
            start_unix_ns=unix_ns(arrived_s),
            attributes={
                names.CELL: self._cell,
                names.REQUEST_ID: entry.request_id,
                names.TENANT: entry.tenant,
                names.PRIORITY: entry.priority,
                names.GEN_AI_REQUEST_CHOICE_COUNT: entry.num_choices,
                names.GEN_AI_USAGE_INPUT_TOKENS: len(entry.prompt),
            },
        )
        self._open[entry.request_id] = span
        return span.traceparent

    def finish(self, terminal: TerminalReply, timeline: Timeline | None) -> None:
        """Draw what happened below the request's span, and close it."""
        span = self._open.pop(terminal.request_id, None)
        if span is None:
            return
        if timeline is not None:
            self._draw(span, timeline)
        stats = terminal.stats
        span.set(
            {
                names.GEN_AI_USAGE_OUTPUT_TOKENS: stats.output_tokens,
                names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: stats.cached_tokens,
                names.PREEMPTIONS: stats.preemptions,
                names.STALL_SECONDS: stats.stall_s,
                names.TRANSFER_SECONDS: stats.transfer_s,
            }
        )
        if terminal.error_code is not None:
            span.set({names.ERROR_TYPE: terminal.error_code})
            span.fail(terminal.error_message or terminal.error_code)
        span.end(None if timeline is None or timeline.finished_s is None else unix_ns(timeline.finished_s))

    def abandon(self, reason: str) -> None:
        """Close what is open: another scheduler goes on with these requests."""
        for span in self._open.values():
            span.fail(reason)
            span.end()
        self._open.clear()

    def _draw(self, span: Span, timeline: Timeline) -> None:
        for admission in timeline.admissions:
            self._draw_admission(span.traceparent, admission)
        for transfer in timeline.transfers:
            self._draw_transfer(span.traceparent, transfer)
        for at_s in timeline.preempted_s:
            span.event(names.EVENT_PREEMPTED, at_unix_ns=unix_ns(at_s))
        for at_s in timeline.worker_lost_s:
            span.event(names.EVENT_WORKER_LOST, at_unix_ns=unix_ns(at_s))
        if timeline.first_token_s is not None:
            span.event(names.EVENT_FIRST_TOKEN, at_unix_ns=unix_ns(timeline.first_token_s))

    def _draw_admission(self, parent: str, admission: Admission) -> None:
        """The wait that ended in an admission, and the choice of worker at its end."""
        queued_ns, admitted_ns = unix_ns(admission.queued_s), unix_ns(admission.admitted_s)
        about: dict[str, AttributeValue] = {names.CHOICE: admission.choice, names.RESUMED: admission.resumed}
        queue = self._tracer.start_span(names.SPAN_QUEUE, parent=parent, start_unix_ns=queued_ns, attributes=about)
        queue.end(admitted_ns)
        route = self._tracer.start_span(
            names.SPAN_ROUTE,
            parent=parent,
            start_unix_ns=admitted_ns,
            attributes={
                **about,
                names.WORKER_ID: admission.worker_id,
                names.ROLE: admission.role,
                names.CACHED_TOKENS: admission.cached_tokens,
                names.PREDICTED_CACHED_TOKENS: admission.predicted_cached_tokens,
                names.PULLED_TOKENS: admission.pulled_tokens,
                **({} if admission.pull_source is None else {names.PULL_SOURCE: admission.pull_source}),
                **_terms(admission.candidates[:MAX_ROUTE_CANDIDATES]),
            },
        )
        route.end(admitted_ns)

    def _draw_transfer(self, parent: str, transfer: Transfer) -> None:
        span = self._tracer.start_span(
            names.SPAN_KV_TRANSFER,
            parent=parent,
            start_unix_ns=unix_ns(transfer.begun_s),
            attributes={
                names.CHOICE: transfer.choice,
                names.TRANSFER_SOURCE: transfer.source,
                names.TRANSFER_TARGET: transfer.target,
                names.TRANSFER_TOKENS: transfer.num_units * UNIT_TOKENS,
                names.TRANSFER_BYTES: transfer.num_bytes,
                names.TRANSFER_TRANSPORT: transfer.transport,
                names.TRANSFER_HANDOFF: transfer.is_handoff,
            },
        )
        if transfer.failure is not None:
            span.fail(transfer.failure)
        span.end(unix_ns(transfer.ended_s))


def _terms(candidates: tuple[RouteCandidate, ...]) -> dict[str, AttributeValue]:
    """Every candidate's cost, term by term, as arrays that align."""
    return {
        names.ROUTE_WORKERS: [candidate.worker_id for candidate in candidates],
        names.ROUTE_COSTS: [candidate.cost for candidate in candidates],
        names.ROUTE_UNCACHED_TOKENS: [candidate.uncached_tokens for candidate in candidates],
        names.ROUTE_QUEUED_TOKENS: [candidate.queued_prefill_tokens for candidate in candidates],
        names.ROUTE_KV_PRESSURE: [candidate.kv_pressure for candidate in candidates],
        names.ROUTE_ACTIVE_DECODES: [candidate.active_decodes for candidate in candidates],
        names.ROUTE_PULL_COSTS: [candidate.pull_cost_tokens for candidate in candidates],
        names.ROUTE_DISTURBED_DECODES: [candidate.disturbed_decodes for candidate in candidates],
        names.ROUTE_PULLED_TOKENS: [candidate.pulled_tokens for candidate in candidates],
        names.ROUTE_PULL_SOURCES: [candidate.pull_source for candidate in candidates],
        names.ROUTE_PREDICTED_PREFILL_S: [candidate.predicted_prefill_s for candidate in candidates],
        names.ROUTE_PREDICTED_PULL_S: [candidate.predicted_pull_s for candidate in candidates],
    }
