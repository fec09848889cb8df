"""The library is built once, whole, by whoever comes first; without it the worker runs on torch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu_worker.kernels import build
from gpu_worker.kernels.build import KernelsUnavailable, library_name, library_path
from gpu_worker.kernels.library import Kernels, load_kernels
from tests.model.checkpoints import make_checkpoint
from tests.model.paged import open_runner

ROOT = Path(__file__).parents[2]


def start(module: list[str], **changes: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PHASEMESH_")}
    environ |= {"PYTHONPATH": str(ROOT), **changes}
    return subprocess.Popen(
        [sys.executable, *module], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
    )


def test_two_processes_that_build_at_once_leave_one_library(built: Path, tmp_path: Path) -> None:
    builders = [start(["-m", "gpu_worker.kernels"], PHASEMESH_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for builder in builders:
        output, _ = builder.communicate(timeout=100)
        assert (builder.returncode, output) == (0, "")
    libraries = [path.name for path in (tmp_path / "kernels").iterdir() if path.suffix != ".lock"]
    assert libraries == [library_name()]
    x, out = torch.ones(2, 8), torch.empty(2, 8)
    Kernels(tmp_path / "kernels" / library_name()).rms_norm(x, torch.ones(8), 0.0, out)
    assert torch.equal(out, x)


def test_no_compiler_is_one_plain_line_and_no_failure(tmp_path: Path) -> None:
    builder = start(["-m", "gpu_worker.kernels"], PHASEMESH_CACHE_DIR=str(tmp_path), CXX="no-such-compiler")
    output, _ = builder.communicate(timeout=60)
    assert builder.returncode == 0
    assert output == "CPU kernels: no C++ compiler (no-such-compiler) on PATH; torch's own are used\n"


def test_kernels_switched_off_build_nothing(tmp_path: Path) -> None:
    builder = start(["-m", "gpu_worker.kernels"], PHASEMESH_CACHE_DIR=str(tmp_path), PHASEMESH_CPU_KERNELS="off")
    output, _ = builder.communicate(timeout=60)
    assert (builder.returncode, output, list(tmp_path.iterdir())) == (0, "", [])


def test_without_a_compiler_a_worker_runs_on_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    directory = make_checkpoint(tmp_path / "model", "llama_mha")
    with caplog.at_level(logging.WARNING):
        runner = open_runner(directory, kernels_dir=tmp_path / "empty")
    assert runner.attention_backend == "torch"
    assert "no C++ compiler" in caplog.text


def test_a_failing_compiler_is_quoted_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'kernels.cpp:1: error: no room' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    with pytest.raises(KernelsUnavailable, match="error: no room"):
        library_path(tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache" / "kernels").iterdir()] == [".lock"]


def test_a_library_that_does_not_load_is_a_plain_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    (tmp_path / library_name()).write_bytes(b"not a library")
    assert load_kernels(tmp_path) is None
