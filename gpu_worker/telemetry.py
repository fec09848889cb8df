"""Metrics and spans of a worker's steps. Called by the compute thread; with tracing off it opens no span.

One span per prefill chunk; one decode span per sequence, from its first decode step to its end. Their parent is
the traceparent that came with the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.batching import StepEntry
from gpu_worker.sequences import LiveSequence
from observability import names
from observability.metrics import WorkerMetrics
from observability.tracing import AttributeValue, Span, Tracer
from wire.ids import SeqId
from wire.plan import StepTiming
from wire.sampling import FinishReason


@dataclass(slots=True)
class _DecodeSpan:
    span: Span
    num_steps: int = 0
    step_s: float = 0.0


class StepTelemetry:
    """What operators see of the executor."""

    def __init__(self, metrics: WorkerMetrics, tracer: Tracer) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._decodes: dict[SeqId, _DecodeSpan] = {}

    def step_done(self, entries: Sequence[StepEntry], timing: StepTiming) -> None:
        """Count a step and draw its spans, before any of its sequences is dropped."""
        self._metrics.observe_step(
            build_s=timing.build_us / 1e6,
            forward_s=timing.forward_us / 1e6,
            sample_s=timing.sample_us / 1e6,
            prefill_tokens=timing.prefill_tokens,
            decode_tokens=timing.decode_tokens,
        )
        if self._tracer.enabled:
            for entry in entries:
                if entry.is_prefill:
                    self._chunk_span(entry, timing)
                else:
                    self._count_decode(entry, timing)

    def set_sequences(self, count: int) -> None:
        self._metrics.sequences.set(count)

    def set_queued_plans(self, count: int) -> None:
        self._metrics.queued_plans.set(count)

    def epoch_began(self, *, after_failure: bool) -> None:
        self._metrics.epochs.inc()
        if after_failure:
            self._metrics.step_failures.inc()

    def sequence_over(self, sequence: LiveSequence) -> None:
        """A sequence left the worker: finished, released, or dropped with its session."""
        decode = self._decodes.pop(sequence.seq_id, None)
        if decode is None:
            return
        attributes: dict[str, AttributeValue] = {
            names.DECODE_TOKENS: decode.num_steps,
            names.DECODE_STEPS: decode.num_steps,
            names.STEP_SECONDS: decode.step_s,
        }
        if sequence.finish_reason is not None:
            attributes[names.GEN_AI_RESPONSE_FINISH_REASONS] = [sequence.finish_reason.value]
        decode.span.set(attributes)
        if sequence.finish_reason is FinishReason.ERROR:
            decode.span.fail("sequence ended in an error")
        decode.span.end()

    def _chunk_span(self, entry: StepEntry, timing: StepTiming) -> None:
        step_ns = timing.step_us * 1000
        span = self._tracer.start_span(
            names.SPAN_PREFILL_CHUNK,
            parent=entry.sequence.traceparent,
            start_unix_ns=timing.started_unix_ns,
            attributes={
                **_identity(entry.sequence),
                names.CHUNK_START: entry.start,
                names.CHUNK_TOKENS: entry.end - entry.start,
                names.BATCH_TOKENS: timing.prefill_tokens + timing.decode_tokens,
                names.STEP_SECONDS: step_ns / 1e9,
            },
        )
        span.end(timing.started_unix_ns + step_ns)

    def _count_decode(self, entry: StepEntry, timing: StepTiming) -> None:
        sequence = entry.sequence
        decode = self._decodes.get(sequence.seq_id)
        if decode is None:
            span = self._tracer.start_span(
                names.SPAN_DECODE,
                parent=sequence.traceparent,
                start_unix_ns=timing.started_unix_ns,
                attributes={**_identity(sequence), names.DECODE_START: entry.start},
            )
            decode = self._decodes[sequence.seq_id] = _DecodeSpan(span)
        decode.num_steps += 1
        decode.step_s += timing.step_us * 1e-6


def _identity(sequence: LiveSequence) -> dict[str, AttributeValue]:
    return {
        names.REQUEST_ID: sequence.request_id,
        names.CHOICE: sequence.choice,
        names.INCARNATION: sequence.incarnation,
    }
