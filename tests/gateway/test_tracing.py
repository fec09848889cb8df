"""The root span of a request, as a real OTLP receiver gets it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from observability import names
from observability.logs import LineFormatter
from observability.tracing import Tracer, setup_tracing
from tests.gateway.conftest import Stack, StackOpener
from tests.gateway.scripted_scheduler import ScriptedScheduler, saying
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from wire.entries import RequestEntry

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as opened:
        yield opened


@pytest.fixture
def tracer(receiver: OtlpReceiver) -> Iterator[Tracer]:
    opened = setup_tracing("gateway", {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint})
    yield opened
    opened.shutdown()


async def span_of(stack: Stack, receiver: OtlpReceiver, tracer: Tracer, **body: object) -> ReceivedSpan:
    """The root span of one request."""
    body = {"model": "smollm2", "prompt": "Hi", **body}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body, headers={"traceparent": PARENT}) as response:
        await response.read()
    tracer.shutdown()
    (span,) = await receiver.wait_for(lambda spans: any(s.kind == "server" for s in spans))
    return span


async def test_a_request_is_one_server_span_under_the_clients(
    new_stack: StackOpener, receiver: OtlpReceiver, tracer: Tracer
) -> None:
    async with new_stack(saying([5, 2], cached_tokens=1), tracer=tracer) as stack:
        span = await span_of(stack, receiver, tracer, temperature=0.5, seed=3, stream=True)
        entry = await stack.scheduler.arrived.get()
    assert (span.name, span.trace_id, span.parent_id) == ("text_completion smollm2", PARENT[3:35], PARENT[36:52])
    assert entry.traceparent == span.traceparent
    assert [event.name for event in span.events] == [names.EVENT_FIRST_TOKEN]
    assert span.error is None
    expected = {
        names.GEN_AI_OPERATION_NAME: "text_completion",
        names.GEN_AI_REQUEST_MODEL: "smollm2",
        names.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        names.GEN_AI_RESPONSE_FINISH_REASONS: ["stop"],
        names.GEN_AI_USAGE_INPUT_TOKENS: 1,
        names.GEN_AI_USAGE_OUTPUT_TOKENS: 2,
        names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 1,
        names.HTTP_RESPONSE_STATUS_CODE: 200,
        names.HTTP_ROUTE: "/v1/completions",
        names.REQUEST_ID: entry.request_id,
    }
    assert {name: _plain(span.attributes.get(name)) for name in expected} == expected


async def test_an_error_marks_the_span(new_stack: StackOpener, receiver: OtlpReceiver, tracer: Tracer) -> None:
    async def fails(scheduler: ScriptedScheduler, entry: RequestEntry) -> None:
        await scheduler.terminate(entry, "worker_lost")

    async with new_stack(fails, tracer=tracer) as stack:
        span = await span_of(stack, receiver, tracer)
    assert span.error == "scripted worker_lost"
    assert span.attributes[names.ERROR_TYPE] == "worker_lost"
    assert span.attributes[names.HTTP_RESPONSE_STATUS_CODE] == 503


async def test_a_refused_request_is_no_fault_of_the_server(
    new_stack: StackOpener, receiver: OtlpReceiver, tracer: Tracer
) -> None:
    async with new_stack(tracer=tracer) as stack:
        span = await span_of(stack, receiver, tracer, temperature=-1)
    assert span.error is None
    assert span.attributes[names.ERROR_TYPE] == "invalid_request"


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


async def finished_line(caplog: pytest.LogCaptureFixture) -> str:
    """The end of one request, as the log shows it: it may come a moment after the answer."""
    async with asyncio.timeout(10):
        while not (found := [r for r in caplog.records if r.name == "gateway.http"]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    (record,) = found
    return LineFormatter("gateway", multiline_tracebacks=False).format(record)


@pytest.mark.parametrize("traced", [True, False])
async def test_a_request_leaves_one_line_in_the_log(
    traced: bool, new_stack: StackOpener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.http")
    headers = {"traceparent": PARENT} if traced else {}
    async with new_stack(saying([5, 2])) as stack:
        body = {"model": "smollm2", "prompt": "Hi"}
        async with stack.http.post(f"{stack.url}/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
        line = await finished_line(caplog)
    assert f" request_id={answer['id']} status=200 prompt_tokens=1 output_tokens=2 ms=" in line
    assert (f" trace_id={PARENT[3:35]}" in line) == ("trace_id" in line) == traced


async def test_a_refused_request_and_one_whose_client_left_show_their_status(
    new_stack: StackOpener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.http")
    async with new_stack() as stack:
        assert (await stack.complete(temperature=-1))[0] == 400
        assert " status=400 " in await finished_line(caplog)
        caplog.clear()
        leaving = asyncio.create_task(stack.complete())
        await stack.scheduler.arrived.get()
        leaving.cancel()
        await asyncio.wait([leaving])
        assert " status=499 prompt_tokens=1 output_tokens=0 " in await finished_line(caplog)
