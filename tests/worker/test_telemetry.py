"""What a worker's steps leave behind for operators: spans at a real collector, and metrics."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from observability import names
from observability.tracing import setup_tracing
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.worker.fake_runner import FakeRunner, reference_output
from tests.worker.fake_worker import running_worker
from tests.worker.plans import chunk, decode, grant, greedy, plan, release
from tests.worker.test_executor import PROMPT, TIMEOUT_S, Client
from wire import worker_pb2 as pb
from wire import worker_pb2_grpc as pb_grpc

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_unix_ns)


async def test_spans_of_prefill_chunks_and_decode_hang_under_the_request() -> None:
    with OtlpReceiver() as receiver:
        tracer = setup_tracing("gpu_worker", {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint})
        async with running_worker(tracer=tracer) as worker:
            client = Client(worker.executor)
            await client.open()
            first = chunk(
                1, 0, 23, tokens=PROMPT, pages=grant([1, 2, 3], 48), sampling=greedy(4), traceparent=TRACEPARENT
            )
            await client.run(plan(1, chunks=[first]))
            await client.run(plan(2, chunks=[chunk(1, 23, 17, children=[(1, 2)])], max_steps=8))
        await asyncio.to_thread(tracer.shutdown)
        spans = await receiver.wait_for(lambda spans: bool(named(list(spans), names.SPAN_DECODE)))
    chunks = named(list(spans), names.SPAN_PREFILL_CHUNK)
    assert [(s.attributes[names.CHUNK_START], s.attributes[names.CHUNK_TOKENS]) for s in chunks] == [(0, 23), (23, 17)]
    (decoding,) = named(list(spans), names.SPAN_DECODE)
    assert all((s.trace_id, s.parent_id) == (TRACE, PARENT) for s in [*chunks, decoding])
    assert decoding.attributes[names.DECODE_START] == 40
    assert decoding.attributes[names.DECODE_TOKENS] == 3
    assert decoding.attributes[names.REQUEST_ID] == "r1"
    assert decoding.attributes[names.CHOICE] == 2
    assert list(decoding.attributes[names.GEN_AI_RESPONSE_FINISH_REASONS]) == ["length"]
    assert chunks[1].end_unix_ns <= decoding.start_unix_ns + 1_000_000
    assert decoding.end_unix_ns > decoding.start_unix_ns
    assert decoding.attributes[names.STEP_SECONDS] == pytest.approx(
        (decoding.end_unix_ns - decoding.start_unix_ns) / 1e9, abs=0.5
    )


async def test_a_released_sequence_ends_its_decode_span() -> None:
    with OtlpReceiver() as receiver:
        tracer = setup_tracing("gpu_worker", {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint})
        async with running_worker(tracer=tracer) as worker:
            client = Client(worker.executor)
            await client.open()
            first = chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48), traceparent=TRACEPARENT)
            await client.run(plan(1, chunks=[first], max_steps=2))
            await client.run(plan(2, releases=[release(1)], max_steps=0))
            await asyncio.to_thread(tracer.shutdown)
            spans = await receiver.wait_for(lambda spans: bool(named(list(spans), names.SPAN_DECODE)))
    assert names.GEN_AI_RESPONSE_FINISH_REASONS not in named(list(spans), names.SPAN_DECODE)[0].attributes


async def test_the_session_span_continues_the_trace_of_its_metadata() -> None:
    with OtlpReceiver() as receiver:
        tracer = setup_tracing("gpu_worker", {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint})
        async with running_worker(tracer=tracer) as worker, grpc.aio.insecure_channel(worker.address) as channel:
            call = pb_grpc.WorkerStub(channel).Session(metadata=(("traceparent", TRACEPARENT),))
            await call.write(pb.ToWorker(attach=pb.Attach(fence=3, scheduler_id="s1")))
            for _ in ("Hello", "Residents"):
                await asyncio.wait_for(call.read(), TIMEOUT_S)
            await call.done_writing()
            assert await asyncio.wait_for(call.code(), TIMEOUT_S) is grpc.StatusCode.OK
        await asyncio.to_thread(tracer.shutdown)
        spans = await receiver.wait_for(lambda spans: bool(spans))
    (session,) = named(list(spans), names.SPAN_WORKER_SESSION)
    assert (session.trace_id, session.parent_id, session.kind) == (TRACE, PARENT, "server")
    assert session.attributes[names.SCHEDULER_ID] == "s1"
    assert session.attributes[names.FENCE] == 3


async def test_metrics_count_steps_tokens_and_sequences() -> None:
    async with running_worker(FakeRunner()) as worker:
        client = Client(worker.executor)
        await client.open()
        chunks = [
            chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48)),
            chunk(2, 0, 8, tokens=PROMPT[:8], pages=grant([4], 16), sampling=greedy(2)),
        ]
        await client.run(plan(1, chunks=chunks, max_steps=3))
        assert len(reference_output(PROMPT, 3)) == 3  # no EOS on the way
        value = worker.metrics.registry.get_sample_value
        assert value("phasemesh_worker_tokens_total", {"phase": "prefill"}) == 48
        assert value("phasemesh_worker_tokens_total", {"phase": "decode"}) == 3
        assert value("phasemesh_worker_step_seconds_count", {"part": "forward"}) == 3
        assert value("phasemesh_worker_sequences") == 1
        assert value("phasemesh_worker_queued_plans") == 0
        assert value("phasemesh_worker_epochs_total") == 1
        await client.run(plan(2, releases=[release(1)], decodes=[decode(1)]))
        assert value("phasemesh_worker_sequences") == 0
