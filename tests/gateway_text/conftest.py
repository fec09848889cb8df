"""Tokenizers of every layout, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.text.tokenizer import Tokenizer, load_tokenizer
from tests.gateway_text.layouts import LAYOUTS


@pytest.fixture(scope="session")
def layout_dirs(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model directories by layout, the real SmolLM2 among them."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {"smollm2": smollm2_dir} | {name: build(root / name) for name, build in LAYOUTS.items()}


@pytest.fixture(scope="session")
def tokenizers_by_layout(layout_dirs: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(directory) for name, directory in layout_dirs.items()}


@pytest.fixture(scope="session")
def smollm2(tokenizers_by_layout: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers_by_layout["smollm2"]
