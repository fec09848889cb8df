"""One trace per request across gateway, scheduler and worker, received by a real OTLP collector."""

from __future__ import annotations

from pathlib import Path

import aiohttp

from observability import names
from tests.mesh.client import complete
from tests.mesh.stack import MeshStack
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_SPAN = "b7ad6b7169203331"


def of_the_request(spans: list[ReceivedSpan]) -> dict[str, list[ReceivedSpan]]:
    by_name: dict[str, list[ReceivedSpan]] = {}
    for span in spans:
        if span.trace_id == TRACE_ID:
            by_name.setdefault(span.name, []).append(span)
    return by_name


async def test_a_request_is_one_trace_over_three_processes(smollm2_dir: Path, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": "50",
            "STEP_TOKEN_BUDGET": "64",
            "ITL_TARGET_MS": "inf",  # chunks as large as the budget, however slow the machine
        }
        with MeshStack(smollm2_dir, tmp_path, env=env) as stack:
            headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_SPAN}-01"}
            async with aiohttp.ClientSession(headers=headers) as session:
                await complete(session, stack.url, list(range(100, 250)), 6, ignore_eos=True)
            root_name = names.request_span_name(names.OPERATION_TEXT_COMPLETION, "m")
            wanted = {root_name, names.SPAN_SCHEDULE, names.SPAN_QUEUE, names.SPAN_ROUTE, names.SPAN_DECODE}
            await receiver.wait_for(lambda spans: wanted <= of_the_request(list(spans)).keys())
            found = of_the_request(receiver.spans)

    (root,) = found[root_name]
    (schedule,) = found[names.SPAN_SCHEDULE]
    assert root.parent_id == CALLER_SPAN and root.kind == "server"
    assert schedule.parent_id == root.span_id
    inner = [names.SPAN_QUEUE, names.SPAN_ROUTE, names.SPAN_PREFILL_CHUNK, names.SPAN_DECODE]
    for span in (span for name in inner for span in found[name]):
        assert span.parent_id == schedule.span_id, span.name
    assert len(found[names.SPAN_PREFILL_CHUNK]) == 3, "150 tokens in chunks of at most 64"
    services = {span.service for spans in found.values() for span in spans}
    assert services == {"phasemesh-gateway", "phasemesh-scheduler", "phasemesh-gpu_worker"}
    assert root.attributes[names.GEN_AI_USAGE_INPUT_TOKENS] == 150
    assert root.attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 6
    assert all(root.start_unix_ns <= s.start_unix_ns <= s.end_unix_ns for spans in found.values() for s in spans)


async def test_disabled_by_the_standard_variable_nothing_is_exported(smollm2_dir: Path, tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_SDK_DISABLED": "true"}
        with MeshStack(smollm2_dir, tmp_path, env=env) as stack:
            async with aiohttp.ClientSession() as session:
                answer = await complete(session, stack.url, [100, 101], 3, ignore_eos=True)
            assert len(answer.token_ids) == 3
        assert not receiver.spans
