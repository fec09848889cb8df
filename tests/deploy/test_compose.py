"""docker-compose.yml without a container engine: its facts, and our services' own commands run as processes."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from phasemesh import redis_server
from phasemesh.client import Client, Generation
from phasemesh.ports import free_port
from tests.deploy.compose import OURS, PYTHON, ROOT, LocalCompose, Loopback, active_services, load_compose, overlaid
from tests.otlp_receiver import OtlpReceiver

COMPOSE = load_compose()
SERVICES: dict[str, Any] = COMPOSE["services"]
OURS_BY_DEFAULT = {"model-pull", "scheduler", "worker-1", "worker-2", "gateway"}


def default_profiles() -> set[str]:
    """What compose reads from .env beside the file."""
    lines = (ROOT / ".env").read_text().splitlines()
    value = next(line.partition("=")[2] for line in lines if line.startswith("COMPOSE_PROFILES="))
    return set(value.split(","))


def listening() -> set[tuple[str, int]]:
    """Every (service, port) that something of ours listens at, plus the two of others that ours talk to."""
    ports = {("redis", 6379), ("otel-collector", 4317)}
    for name, service in SERVICES.items():
        for variable, value in service.get("environment", {}).items():
            if variable.endswith("_PORT"):
                ports.add((name, int(value)))
    return ports


def running_locally(services: dict[str, Any], models: Path, otlp_port: int, tmp_path: Path) -> LocalCompose:
    """These services as processes, none of them started yet."""
    taken: set[int] = set()
    ports = {address: free_port(taken) for address in listening() if address[0] in services}
    ports["otel-collector", 4317] = otlp_port
    volumes = {"models": models, "redis": tmp_path / "redis"}
    volumes["redis"].mkdir()
    redis_port = str(ports["redis", 6379])
    programs = {
        "python": PYTHON,
        "redis-server": [str(redis_server.find_server()), "--port", redis_port, "--dir", str(volumes["redis"])],
        "redis-cli": [*PYTHON, "-m", "tests.deploy.redis_cli", "-p", redis_port],
    }
    return LocalCompose(services, Loopback(ports, volumes), programs, tmp_path)


def test_the_default_stack_answers_a_question_and_traces_it(smollm2_dir: Path, tmp_path: Path) -> None:
    services = active_services(COMPOSE, default_profiles())
    ours = {name for name, service in services.items() if service["image"].startswith(OURS)}
    assert ours == OURS_BY_DEFAULT
    with OtlpReceiver() as receiver:
        otlp_port = int(receiver.endpoint.rpartition(":")[2])
        with running_locally(services, smollm2_dir.parent.parent, otlp_port, tmp_path) as stack:
            assert "Paris" in answer_of(stack, ours)
            everyone = {"phasemesh-gateway", "phasemesh-scheduler", "phasemesh-gpu_worker"}
            receiver.wait(lambda spans: {span.service for span in spans} >= everyone)


def answer_of(stack: LocalCompose, ours: set[str]) -> str:
    """Start our services, wait for them, and ask what the capital of France is."""
    for name in sorted(ours):
        stack.up(name)
    for name in sorted(ours - {"model-pull"}):
        stack.wait_until_healthy(name)
    client = Client(f"http://127.0.0.1:{stack.loopback.port('gateway', 8000)}")
    generation = Generation(max_tokens=16, temperature=0.0)
    return "".join(client.chat(client.model(), "What is the capital of France?", generation))


def test_the_override_for_separate_pools_gives_each_worker_a_role(smollm2_dir: Path, tmp_path: Path) -> None:
    compose = overlaid(COMPOSE, load_compose(ROOT / "deploy/compose.disaggregated.yml"))
    services = active_services(compose, default_profiles())
    assert set(services) == set(active_services(COMPOSE, default_profiles())), "it adds no service"
    for name in ("worker-1", "worker-2"):
        services[name]["environment"]["PHASEMESH_SIMULATE"] = "on"
    with (
        OtlpReceiver() as receiver,
        running_locally(
            services, smollm2_dir.parent.parent, int(receiver.endpoint.rpartition(":")[2]), tmp_path
        ) as stack,
    ):
        assert answer_of(stack, OURS_BY_DEFAULT)
        metrics = f"http://127.0.0.1:{stack.loopback.port('scheduler', 9100)}/metrics"
        with urllib.request.urlopen(metrics) as response:
            exported = response.read().decode()
    for worker, role in (("worker-1", "prefill"), ("worker-2", "decode")):
        assert f'phasemesh_scheduler_worker_sequences{{role="{role}",worker="{worker}"}}' in exported


def test_an_unknown_host_port_or_volume_fails() -> None:
    loopback = Loopback({("redis", 6379): 7000}, {})
    spec = {"volumes": ["elsewhere:/data"]}
    assert loopback.text("gateway", "redis://redis:6379/0") == "redis://127.0.0.1:7000/0"
    for name, value in (
        ("PHASEMESH_REDIS_URL", "redis://valkey:6379/0"),
        ("PHASEMESH_REDIS_URL", "redis://redis:6380/0"),
        ("PHASEMESH_PORT", "8000"),
        ("PHASEMESH_HOST", "127.0.0.1"),
        ("PHASEMESH_CACHE_DIR", "/models"),
        ("PHASEMESH_STATE_DIR", "/data"),
    ):
        with pytest.raises(AssertionError):
            loopback.variable("gateway", spec, name, value)


@pytest.mark.parametrize("name", SERVICES)
def test_every_image_has_a_pinned_tag(name: str) -> None:
    assert re.fullmatch(r"[a-z0-9/-]+:v?\d+\.\d+\.\d+(-[a-z]+)?", SERVICES[name]["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_restarts_and_has_a_health_check(name: str) -> None:
    service = SERVICES[name]
    if name == "model-pull":
        assert service["restart"].startswith("on-failure")
        return
    assert service["restart"] == "unless-stopped"
    if name != "otel-collector":  # its image has nothing to run a check with
        assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", [name for name in SERVICES if name.startswith("worker")])
def test_workers_may_write_the_packed_weights_that_they_share(name: str) -> None:
    assert "models:/models" in SERVICES[name]["volumes"]
    assert SERVICES[name]["environment"]["PHASEMESH_CACHE_DIR"] == "/models"


@pytest.mark.parametrize("name", SERVICES)
def test_dependencies_and_volumes_exist(name: str) -> None:
    service = SERVICES[name]
    assert set(service.get("depends_on", {})) <= set(SERVICES)
    for volume in service.get("volumes", []):
        source = volume.split(":")[0]
        if source.startswith("./"):
            assert (ROOT / source).exists()
        else:
            assert source in COMPOSE["volumes"]


def test_ports_are_published_on_loopback_only() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_the_gpu_profile_replaces_the_cpu_workers() -> None:
    gpu = active_services(COMPOSE, {"gpu"})
    assert [name for name in gpu if name.startswith("worker")] == ["worker-gpu"]
    (device,) = gpu["worker-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia" and "gpu" in device["capabilities"]
    assert gpu["worker-gpu"]["build"]["args"]["VARIANT"] == "cuda"
    assert gpu["worker-gpu"]["command"] == SERVICES["worker-1"]["command"]
    for service in gpu.values():  # nothing that runs waits for something that does not
        assert set(service.get("depends_on", {})) <= set(gpu)


def test_prometheus_scrapes_every_service_where_it_listens() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())
    scraped = set()
    for job in config["scrape_configs"]:
        for targets in job.get("static_configs", []):
            scraped |= {(host, int(port)) for host, port in (t.split(":") for t in targets["targets"])}
        for lookup in job.get("dns_sd_configs", []):
            scraped |= {(host, lookup["port"]) for host in lookup["names"]}
    health = {
        (name, int(service["healthcheck"]["test"][-1].split(":")[2].split("/")[0]))
        for name, service in SERVICES.items()
        if service["image"].startswith(OURS) and "healthcheck" in service
    }
    assert scraped - {("otel-collector", 8888)} == health


def test_the_collector_listens_where_services_export_to_and_sends_to_jaeger() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel-collector.yaml").read_text())
    endpoint = SERVICES["gateway"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert endpoint == "http://otel-collector:4317"
    assert config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"] == "0.0.0.0:4317"
    assert config["exporters"]["otlp/jaeger"]["endpoint"].split(":")[0] in SERVICES
    pipeline = config["service"]["pipelines"]["traces"]
    for part in ("receivers", "processors", "exporters"):
        assert set(pipeline[part]) <= set(config[part])
