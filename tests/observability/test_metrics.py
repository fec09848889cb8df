"""Metrics as a scrape shows them, and the table that documents them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.parser import text_string_to_metric_families

from observability import names
from observability.metrics import PAGE_STATES, GatewayMetrics, SchedulerMetrics, WorkerMetrics

SERVICES: dict[str, type[GatewayMetrics | SchedulerMetrics | WorkerMetrics]] = {
    "gateway": GatewayMetrics,
    "scheduler": SchedulerMetrics,
    "worker": WorkerMetrics,
}
DOCUMENT = Path(__file__).parents[2] / "docs" / "observability.md"


def scrape(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample, parsed from the text a scraper gets."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return scrape(registry).get((name, frozenset(labels.items())))


def test_every_instance_has_a_registry_of_its_own() -> None:
    a, b = GatewayMetrics(), GatewayMetrics()
    a.requests.labels("/v1/models", 200).inc()
    assert value(a.registry, "phasemesh_gateway_requests_total", route="/v1/models", status="200") == 1
    assert value(b.registry, "phasemesh_gateway_requests_total", route="/v1/models", status="200") is None


def test_autoscalers_find_the_names_they_read() -> None:
    gateway, scheduler = GatewayMetrics(), SchedulerMetrics()
    for histogram in (gateway.ttft_s, gateway.itl_s, gateway.tpot_s, gateway.e2e_s):
        histogram.labels("m").observe(0.2)
    gateway.prompt_tokens.labels("m").inc(5)
    gateway.generation_tokens.labels("m").inc(3)
    gateway.request_success.labels("m", "stop").inc()
    scheduler.requests_running.labels("m").set(2)
    scheduler.requests_waiting.labels("m").set(7)
    scheduler.queue_time_s.labels("m").observe(0.1)
    scheduler.preemptions.labels("m").inc()
    scheduler.prefix_cache_queries.labels("m").inc(64)
    scheduler.prefix_cache_hits.labels("m").inc(48)

    m = {"model_name": "m"}
    for name in (
        "time_to_first_token",
        "inter_token_latency",
        "request_time_per_output_token",
        "e2e_request_latency",
    ):
        assert value(gateway.registry, f"vllm:{name}_seconds_count", **m) == 1
        assert value(gateway.registry, f"vllm:{name}_seconds_sum", **m) == 0.2
    assert value(gateway.registry, "vllm:prompt_tokens_total", **m) == 5
    assert value(gateway.registry, "vllm:generation_tokens_total", **m) == 3
    assert value(gateway.registry, "vllm:request_success_total", finished_reason="stop", **m) == 1
    assert value(scheduler.registry, "vllm:num_requests_running", **m) == 2
    assert value(scheduler.registry, "vllm:num_requests_waiting", **m) == 7
    assert value(scheduler.registry, "vllm:request_queue_time_seconds_count", **m) == 1
    assert value(scheduler.registry, "vllm:num_preemptions_total", **m) == 1
    assert value(scheduler.registry, "vllm:prefix_cache_queries_total", **m) == 64
    assert value(scheduler.registry, "vllm:prefix_cache_hits_total", **m) == 48


def test_page_states_add_up_to_the_pool_and_give_the_usage() -> None:
    metrics = SchedulerMetrics()
    metrics.set_pages("m", "w0", free=5, cached=3, in_use=1, retiring=1)
    pages = [value(metrics.registry, "phasemesh_scheduler_kv_pages", worker="w0", state=s) for s in PAGE_STATES]
    assert pages == [5, 3, 1, 1]
    assert value(metrics.registry, "vllm:kv_cache_usage_perc", model_name="m", worker="w0") == pytest.approx(0.2)


def test_a_lost_worker_leaves_its_counters_but_no_gauge() -> None:
    metrics = SchedulerMetrics()
    for worker in ("w0", "w1"):
        metrics.set_pages("m", worker, free=1, cached=0, in_use=0, retiring=0)
        metrics.observe_step(worker, step_s=0.01, prefill_tokens=32, decode_tokens=4)
    metrics.forget_worker("w0")
    left = scrape(metrics.registry)
    gauges = [labels for (name, labels) in left if name in (names.SCHEDULER_KV_PAGES, names.VLLM_KV_CACHE_USAGE)]
    assert {dict(labels)["worker"] for labels in gauges} == {"w1"}
    assert value(metrics.registry, "phasemesh_scheduler_tokens_total", worker="w0", phase="prefill") == 32


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_exports_its_memory(service: str) -> None:
    resident_bytes = value(SERVICES[service]().registry, "process_resident_memory_bytes")
    assert resident_bytes is not None
    assert resident_bytes > 1e6


def test_a_step_is_counted_by_part_and_phase() -> None:
    metrics = WorkerMetrics()
    metrics.observe_step(build_s=0.001, forward_s=0.03, sample_s=0.002, prefill_tokens=16, decode_tokens=3)
    assert value(metrics.registry, "phasemesh_worker_step_seconds_sum", part="forward") == 0.03
    assert value(metrics.registry, "phasemesh_worker_tokens_total", phase="decode") == 3


@pytest.mark.parametrize("service", SERVICES)
def test_names_follow_prometheus_habits(service: str) -> None:
    for family in SERVICES[service]().registry.collect():
        assert re.fullmatch(r"(vllm:|phasemesh_|process_)[a-z0-9_]+", family.name)
        assert family.documentation.endswith(".")
        assert family.type != "histogram" or family.name.endswith("_seconds")


def collectors(metrics: object) -> Iterator[Any]:
    """Every metric of the object, and of the groups of metrics in it."""
    for member in vars(metrics).values():
        if isinstance(member, MetricWrapperBase):
            yield member
        elif not isinstance(member, CollectorRegistry | dict):
            yield from collectors(member)


def test_the_document_lists_every_metric_with_its_type_and_labels() -> None:
    """docs/observability.md's table and the code agree, in both directions."""
    row = re.compile(r"^\| `([^`]+)` \| (\w+) \|([^|]*)\| ([^|]*) \|", re.MULTILINE)
    documented = {
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), service)
        for name, kind, labels, services in row.findall(DOCUMENT.read_text())
        for service in services.split(", ")
    }
    built = {
        (
            collector._name + ("_total" if collector._type == "counter" else ""),  # as a scrape shows it
            collector._type,
            collector._labelnames,
            service,
        )
        for service, cls in SERVICES.items()
        for collector in collectors(cls())
    }
    assert documented == built


def test_the_document_draws_every_span() -> None:
    drawn = re.findall(r"[a-z_]+", DOCUMENT.read_text().split("```")[1])
    spans = {value for name, value in vars(names).items() if name.startswith("SPAN_")}
    assert spans <= set(drawn)
