"""Configuration: every variable is read, checked and documented; every mistake is named."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from wire.config import (
    CONFIGS,
    PREFIX,
    GatewayConfig,
    LauncherConfig,
    SchedulerConfig,
    WorkerConfig,
    env_fields,
    known_variables,
    load,
)
from wire.errors import ConfigInvalid

ALL_FIELDS = [(cls, f) for cls in CONFIGS for f in env_fields(cls)]
VARIABLES = [f.metadata["env"] for _, f in ALL_FIELDS]


def test_an_empty_environment_gives_the_defaults() -> None:
    for cls in CONFIGS:
        assert load(cls, {}) == cls()
    assert load(LauncherConfig, {"PATH": "/bin", "OTEL_SERVICE_NAME": "x"}) == LauncherConfig()


def test_values_reach_their_slice() -> None:
    environ = {
        "PHASEMESH_CELL": "blue",
        "PHASEMESH_MODEL": "/models/m",
        "PHASEMESH_PORT": "8001",
        "PHASEMESH_WORKERS": "2",
        "PHASEMESH_KV_PAGE_SIZE": "64",
        "PHASEMESH_START_REDIS": "off",
        "PHASEMESH_DRAIN_S": "0.5",
    }
    config = load(LauncherConfig, environ)
    assert config.gateway.cell.cell == config.worker.cell.cell == "blue"
    assert config.gateway.model.model == "/models/m"
    assert (config.gateway.port, config.gateway.drain_s) == (8001, 0.5)
    assert (config.workers, config.worker.page_size, config.start_redis) == (2, 64, False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("YES", True), ("on", True), ("0", False), ("False", False), ("no", False)],
)
def test_booleans_are_written_in_the_usual_ways(text: str, value: bool) -> None:
    assert load(LauncherConfig, {"PHASEMESH_START_REDIS": text}).start_redis is value


def test_a_set_but_empty_variable_is_unset() -> None:
    assert load(WorkerConfig, {"PHASEMESH_KV_PAGES": "", "PHASEMESH_DEVICE": ""}) == WorkerConfig()


@pytest.mark.parametrize(
    ("cls", "variable", "text", "complaint"),
    [
        (GatewayConfig, "PHASEMESH_PORT", "http", "not a whole number"),
        (GatewayConfig, "PHASEMESH_PORT", "80.5", "not a whole number"),
        (GatewayConfig, "PHASEMESH_PORT", "-1", "at least 0"),
        (GatewayConfig, "PHASEMESH_PORT", "99999", "at most 65535"),
        (SchedulerConfig, "PHASEMESH_KV_WATERMARK", "2", "at most 0.9"),
        (GatewayConfig, "PHASEMESH_MAX_LIVE_REQUESTS", "0", "at least 1"),
        (GatewayConfig, "PHASEMESH_DRAIN_S", "soon", "not a number"),
        (GatewayConfig, "PHASEMESH_DRAIN_S", "nan", "at least 0"),
        (SchedulerConfig, "PHASEMESH_STEP_TOKEN_BUDGET", "1", "at least 2"),
        (SchedulerConfig, "PHASEMESH_KV_WATERMARK", "-0.1", "at least 0"),
        (WorkerConfig, "PHASEMESH_WEIGHT_DTYPE", "int4", "one of auto, float32, bfloat16, int8"),
        (WorkerConfig, "PHASEMESH_ACTIVATION_DTYPE", "float8", "one of auto, float32, bfloat16, int8"),
        (WorkerConfig, "PHASEMESH_LOG_LEVEL", "loud", "one of debug, info, warning, error"),
        (WorkerConfig, "PHASEMESH_KV_PAGE_SIZE", "8", "at least 16"),
        (WorkerConfig, "PHASEMESH_WORKER_ROLE", "boss", "one of prefill, decode, both"),
        (WorkerConfig, "PHASEMESH_WORKER_MIN_PROMPT_TOKENS", "-1", "at least 0"),
        (LauncherConfig, "PHASEMESH_START_REDIS", "perhaps", "not on or off"),
    ],
)
def test_a_malformed_value_is_refused_by_name(cls: type[Any], variable: str, text: str, complaint: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(cls, {variable: text})
    assert caught.value.param == variable
    assert caught.value.message.startswith(f"{variable}={text!r}: ")
    assert complaint in caught.value.message


@pytest.mark.parametrize("cls", CONFIGS)
def test_an_unknown_variable_is_refused_by_name(cls: type[Any]) -> None:
    with pytest.raises(ConfigInvalid, match="unknown variable PHASEMESH_PROT") as caught:
        load(cls, {"PHASEMESH_PROT": "1"})
    assert caught.value.param == "PHASEMESH_PROT"


def test_a_service_tolerates_the_variables_of_the_others() -> None:
    assert load(GatewayConfig, {"PHASEMESH_KV_PAGES": "100", "PHASEMESH_WORKERS": "3"}) == GatewayConfig()


def test_no_two_fields_read_one_variable() -> None:
    assert len(VARIABLES) == len(set(VARIABLES))
    assert set(VARIABLES) == known_variables()


@pytest.mark.parametrize(("cls", "f"), ALL_FIELDS, ids=VARIABLES)
def test_every_variable_is_documented_and_its_default_is_valid(cls: type[Any], f: dataclasses.Field[Any]) -> None:
    assert re.fullmatch(PREFIX + r"[A-Z][A-Z0-9_]*", f.metadata["env"])
    assert len(f.metadata["help"]) > 5
    assert f.metadata["help"].endswith(".")
    if f.default is not None:
        assert load(cls, {f.metadata["env"]: str(f.default)}) == cls()


def test_documents_name_only_variables_that_exist() -> None:
    root = Path(__file__).parents[2]
    for document in [*root.glob("*.md"), *root.glob("docs/**/*.md")]:
        named = set(re.findall(rf"{PREFIX}[A-Z0-9_]*[A-Z0-9]", document.read_text()))
        assert named <= known_variables(), document


@pytest.mark.parametrize(("shortest", "longest"), [("0", "0"), ("5", "0"), ("0", "5"), ("5", "5"), ("5", "6")])
def test_a_pool_by_prompt_length_may_be_bounded_on_either_side(shortest: str, longest: str) -> None:
    environ = {"PHASEMESH_WORKER_MIN_PROMPT_TOKENS": shortest, "PHASEMESH_WORKER_MAX_PROMPT_TOKENS": longest}
    config = load(WorkerConfig, environ)
    assert (config.min_prompt_tokens, config.max_prompt_tokens) == (int(shortest), int(longest))


def test_a_pool_that_no_prompt_fits_is_refused_by_name() -> None:
    environ = {"PHASEMESH_WORKER_MIN_PROMPT_TOKENS": "6", "PHASEMESH_WORKER_MAX_PROMPT_TOKENS": "5"}
    for cls in (WorkerConfig, LauncherConfig):
        with pytest.raises(ConfigInvalid) as caught:
            load(cls, environ)
        assert caught.value.param == "PHASEMESH_WORKER_MAX_PROMPT_TOKENS"
        assert "at least PHASEMESH_WORKER_MIN_PROMPT_TOKENS, 6" in caught.value.message


def test_configuration_cannot_be_changed_after_loading() -> None:
    for cls in CONFIGS:
        first = dataclasses.fields(cls)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(load(cls, {}), first, None)
