"""The compiled kernels, once per instruction set that this CPU runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpu_worker.kernels.build import KernelsUnavailable, instruction_sets, library_path
from gpu_worker.kernels.library import Kernels
from wire.config import ModelConfig, load
from wire.model_path import cache_root


@pytest.fixture(scope="session")
def built() -> Path:
    """The library. Without a C++ compiler these tests fail, and say so."""
    return library_path(cache_root(load(ModelConfig, os.environ)))


@pytest.fixture(scope="session", params=list(instruction_sets()))
def kernels(request: pytest.FixtureRequest, built: Path) -> Kernels:
    """One per instruction set; those that this CPU lacks are skipped."""
    try:
        return Kernels(built, request.param)
    except KernelsUnavailable as obstacle:
        pytest.skip(str(obstacle))
