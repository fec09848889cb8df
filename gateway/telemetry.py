"""What one request leaves behind for those who look: its root span, its metrics, one line in the log."""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from gateway.api.options import Options
from observability import names
from observability.metrics import GatewayMetrics
from observability.tracing import Tracer
from wire.entries import RequestStats
from wire.errors import MeshError
from wire.ids import RequestId

log = logging.getLogger("gateway.http")

CLIENT_LEFT_STATUS = 499
"""Shown as the status of a request whose client did not wait for its answer (nginx's number)."""


class Telemetry:
    """`with Telemetry(…) as telemetry:` around all of a request's handling; what leaves it as an exception marks the
    span."""

    def __init__(
        self,
        tracer: Tracer,
        metrics: GatewayMetrics,
        *,
        operation: str,
        model: str,
        route: str,
        request_id: RequestId,
        traceparent: str,
    ) -> None:
        self._metrics = metrics
        self._model = model
        self._request_id = request_id
        self._prompt_tokens = 0
        self._status = 500  # until something is known
        self._traced = tracer.enabled
        self._span = tracer.start_span(
            names.request_span_name(operation, model),
            parent=traceparent,
            kind="server",
            attributes={
                names.GEN_AI_OPERATION_NAME: operation,
                names.GEN_AI_PROVIDER_NAME: names.PROVIDER,
                names.HTTP_REQUEST_METHOD: "POST",
                names.HTTP_ROUTE: route,
            }
            if tracer.enabled
            else None,
        )
        self._started_s = time.perf_counter()
        self._itl_s = metrics.itl_s.labels(model)  # found once: it is asked for with every token
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._first_s: dict[int, float] = {}  # choice index → when its first token came
        self._last_s: dict[int, float] = {}
        self._num_tokens: dict[int, int] = {}
        self._finish_reasons: dict[int, str] = {}

    @property
    def traceparent(self) -> str:
        return self._span.traceparent

    def asked(self, options: Options, tenant: str) -> None:
        """The request is well-formed."""
        if not self._traced:
            return
        sampling = options.sampling
        self._span.set(
            {
                names.GEN_AI_REQUEST_MODEL: options.model,
                names.GEN_AI_REQUEST_CHOICE_COUNT: options.num_choices,
                names.GEN_AI_REQUEST_TEMPERATURE: sampling.temperature,
                names.GEN_AI_REQUEST_TOP_P: sampling.top_p,
                names.GEN_AI_REQUEST_TOP_K: sampling.top_k,
                names.GEN_AI_REQUEST_PRESENCE_PENALTY: sampling.presence_penalty,
                names.GEN_AI_REQUEST_FREQUENCY_PENALTY: sampling.frequency_penalty,
                names.GEN_AI_REQUEST_SEED: str(sampling.seed),  # 64-bit unsigned: beyond OTLP's signed integers
                names.GEN_AI_REQUEST_STOP_SEQUENCES: options.stops,
                names.REQUEST_ID: self._request_id,
                names.TENANT: tenant,
                names.PRIORITY: options.priority,
                names.GEN_AI_REQUEST_STREAM: options.stream,
                names.GEN_AI_RESPONSE_ID: self._request_id,
            }
        )

    def admitted(self, prompt_tokens: int, max_tokens: int) -> None:
        """The request is in the mesh."""
        self._prompt_tokens = prompt_tokens
        self._metrics.prompt_tokens.labels(self._model).inc(prompt_tokens)
        if self._traced:
            self._span.set(
                {names.GEN_AI_USAGE_INPUT_TOKENS: prompt_tokens, names.GEN_AI_REQUEST_MAX_TOKENS: max_tokens}
            )

    def got_tokens(self, index: int, count: int) -> None:
        """A choice gained tokens just now."""
        if count == 0:
            return
        now_s = time.perf_counter()
        if not self._first_s:
            self._metrics.ttft_s.labels(self._model).observe(now_s - self._started_s)
            self._span.event(names.EVENT_FIRST_TOKEN)
            self._span.set({names.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: now_s - self._started_s})
        if index in self._last_s:
            each_s = (now_s - self._last_s[index]) / count
            for _ in range(count):
                self._itl_s.observe(each_s)
        else:
            self._first_s[index] = now_s
        self._last_s[index] = now_s
        self._num_tokens[index] = self._num_tokens.get(index, 0) + count
        self._generation_tokens.inc(count)

    def finished(self, index: int, finish_reason: str) -> None:
        """A choice is over."""
        self._finish_reasons[index] = finish_reason
        self._metrics.request_success.labels(self._model, finish_reason).inc()
        count = self._num_tokens.get(index, 0)
        if count > 1:
            tpot_s = (self._last_s[index] - self._first_s[index]) / (count - 1)
            self._metrics.tpot_s.labels(self._model).observe(tpot_s)

    def answered(self, stats: list[RequestStats | None]) -> None:
        """Every choice is over and delivered."""
        self._status = 200
        self._metrics.e2e_s.labels(self._model).observe(time.perf_counter() - self._started_s)
        if self._traced:
            self._span.set(
                {
                    names.GEN_AI_USAGE_OUTPUT_TOKENS: sum(self._num_tokens.values()),
                    names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: sum(s.cached_tokens for s in stats if s is not None),
                    names.GEN_AI_RESPONSE_FINISH_REASONS: [r for _, r in sorted(self._finish_reasons.items())],
                    names.GEN_AI_RESPONSE_MODEL: self._model,
                    names.HTTP_RESPONSE_STATUS_CODE: 200,
                }
            )

    def failed(self, error: MeshError) -> None:
        self._status = error.http_status
        self._span.set({names.ERROR_TYPE: error.code, names.HTTP_RESPONSE_STATUS_CODE: error.http_status})
        if error.http_status >= 500:  # a refused request is no fault of the server (HTTP span conventions)
            self._span.fail(error.message)

    def client_left(self) -> None:
        self._status = CLIENT_LEFT_STATUS
        self._span.event(names.EVENT_CANCELLED, {names.CANCEL_REASON: "disconnect"})
        self._span.fail("the client left")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        match exc:
            case None:
                pass
            case MeshError():
                self.failed(exc)
            case asyncio.CancelledError():
                self.client_left()
            case _:
                self._span.fail(repr(exc))
        self._span.end()
        self._log_end()

    def _log_end(self) -> None:
        log.info(
            "finished",
            extra={
                "request_id": self._request_id,
                "status": self._status,
                "prompt_tokens": self._prompt_tokens,
                "output_tokens": sum(self._num_tokens.values()),
                "ms": round(1000 * (time.perf_counter() - self._started_s)),
                "traceparent": self._span.traceparent,
            },
        )
