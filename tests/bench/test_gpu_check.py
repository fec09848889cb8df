"""bench.gpu_check without a GPU: everything it can do on a CPU, at sizes of a second."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_check import full_scale, main
from bench.gpu_correctness import Check
from bench.gpu_model import (
    GIB,
    SHAPES,
    SMALL,
    RerunGraph,
    fitting_shape,
    float8_model,
    num_multiplied,
    random_model,
    shallow,
    weight_bytes,
)
from gpu_worker.float8_linear import emulated

CPU = torch.device("cpu")
ON_A_CPU = ["--device", "cpu", "--small"]


def test_on_a_cpu_all_is_right_and_the_report_says_what_did_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    assert main([*ON_A_CPU, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["passed"]
    assert len(report["checks"]) == 11
    assert len(report["speeds"]) == 10
    assert all(speed["ratio"] > 0 for speed in report["speeds"])
    assert any("CUDA graphs" in note and "did not run" in note for note in report["notes"])
    output = capsys.readouterr().out
    assert all(note in output for note in report["notes"])


def test_a_wrong_graph_is_found_and_nothing_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RerunGraph, "replay", lambda graph: None)  # as if its inputs were not the static ones
    path = tmp_path / "report.json"
    assert main([*ON_A_CPU, "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    wrong = [check["name"] for check in report["checks"] if not check["passed"]]
    assert "torch: decode graphs against eager" in wrong
    assert report["speeds"] == []


def test_without_time_measurements_are_left_out_and_checks_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "TIME_LIMIT_S", -1.0)
    path = tmp_path / "report.json"
    assert main([*ON_A_CPU, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert (report["cut_short"], report["speeds"], len(report["checks"])) == (True, [], 11)


def test_a_check_without_a_number_has_not_passed() -> None:
    assert not Check("", float("nan"), 1.0).passed
    assert Check("", 1.0, 1.0).passed


@pytest.mark.parametrize("arguments", [["--device", "cuda"], ["--device", "cpu"]])
def test_what_cannot_run_is_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2


def test_what_a_step_reads_and_multiplies() -> None:
    model = random_model(SMALL, torch.float32, CPU)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128  # q, k and v, o, MLP
    assert num_multiplied(SMALL) == (2 * layer, 64 * 512)
    assert weight_bytes(model) == 4 * (2 * layer + 64 * 512 + 5 * 64)
    scales = 2 * (64 + 2 * 32 + 64 + 2 * 128 + 64)
    float8 = float8_model(SMALL, torch.float32, CPU, emulated)
    assert weight_bytes(float8) == 2 * layer + 4 * (scales + 64 * 512 + 5 * 64)


def test_shapes_are_those_of_the_models_they_are_named_after() -> None:
    billions = [sum(num_multiplied(config)) / 1e9 for config in SHAPES.values()]
    assert billions == pytest.approx([7.5, 3.2, 1.2], abs=0.05)  # without the embedding
    assert fitting_shape(139 * GIB).hidden_size == 4096
    assert fitting_shape(30 * GIB).hidden_size == 3072
    assert fitting_shape(8 * GIB).hidden_size == 2048
    assert full_scale(139 * GIB).batches == [1, 8, 32, 128]
    assert full_scale(8 * GIB).batches == [1, 8, 32]
    assert shallow(SHAPES[0]) == replace(SHAPES[0], num_layers=4, layer_windows=(None,) * 4, vocab_size=8192)


def test_nothing_but_torch_and_numpy_is_needed() -> None:
    absent = (
        "aiohttp",
        "grpc",
        "redis",
        "safetensors",
        "tokenizers",
        "transformers",
        "opentelemetry",
        "prometheus_client",
    )
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "import bench.gpu_check, gpu_worker.cuda.open_runner"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(gpu_check.__file__).parents[1])
