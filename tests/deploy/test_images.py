"""deploy/Dockerfile, .dockerignore and the Grafana dashboard, without a container engine."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from observability.metrics import GatewayMetrics, SchedulerMetrics, WorkerMetrics
from tests.deploy.compose import ROOT

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
STAGES: dict[str, str] = dict(
    re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
)
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/phasemesh.json").read_text())
PACKAGES = set(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
)


def test_the_image_runs_as_a_user_without_rights() -> None:
    (user,) = re.findall(r"^USER (\S+)$", STAGES["runtime-cpu"], re.MULTILINE)
    assert user.split(":")[0].isdigit() and int(user.split(":")[0]) > 0
    assert "USER" not in DOCKERFILE.split("AS runtime-cuda")[1]


def test_the_base_image_is_pinned() -> None:
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-\w+$", DOCKERFILE, re.MULTILINE)


def test_what_runs_installs_nothing_and_copies_only_what_was_built() -> None:
    runtime = "".join(body for name, body in STAGES.items() if name.startswith("runtime"))
    assert "pip install" not in runtime and "apt-get" not in runtime
    assert all("--from=" in line for line in re.findall(r"^COPY .*$", runtime, re.MULTILINE))


def test_both_variants_exist() -> None:
    assert DOCKERFILE.rstrip().splitlines()[-2] == "FROM runtime-${VARIANT}"
    assert {"runtime-cpu", "runtime-cuda"} <= set(STAGES)


def test_the_image_has_every_package_and_the_builder_receives_it() -> None:
    copied = set(re.findall(r"^COPY (\w+) \1$", STAGES["code"], re.MULTILINE))
    assert copied == PACKAGES
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    named = set(re.search(r"^COPY (.*) \./$", STAGES["dependencies"], re.MULTILINE)[1].split())  # type: ignore[index]
    assert sent == PACKAGES | named


def sample_names(registry: CollectorRegistry) -> set[str]:
    """Names that a scrape of this registry may show."""

    def of(metric: Metric) -> set[str]:
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
        }
        return {metric.name + suffix for suffix in suffixes.get(metric.type, ("",))}

    return set().union(*(of(metric) for metric in registry.collect()))


@pytest.mark.parametrize("panel", [p for p in DASHBOARD["panels"] if p["type"] != "row"], ids=lambda p: p["title"])
def test_the_dashboard_asks_only_for_metrics_that_exist(panel: dict[str, object]) -> None:
    known = set().union(*(sample_names(m().registry) for m in (GatewayMetrics, SchedulerMetrics, WorkerMetrics)))
    targets = panel["targets"]
    assert isinstance(targets, list)
    for target in targets:
        asked = set(re.findall(r"(?:vllm:|phasemesh_)\w+", target["expr"]))
        assert asked and asked <= known
