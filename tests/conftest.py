"""Fixtures every suite shares: the real model's directory."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory."""
    return Path("/tmp/smollm2")
