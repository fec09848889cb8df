"""Fixtures every suite shares: the real model's directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from phasemesh import models
from phasemesh.progress import Progress
from wire.config import ModelConfig, load

DEFAULT_MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory; fetched and converted the first time."""
    return models.pull(load(ModelConfig, os.environ), DEFAULT_MODEL, Progress())
