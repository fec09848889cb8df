"""Fixtures of the model suites: tiny checkpoints made once, and their transformers twins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.model.checkpoints import make_checkpoint

Reference = Callable[[list[int]], torch.Tensor]
"""Token ids → float32 logits [len(ids), vocab] by transformers, eager attention."""


def load_reference(directory: Path) -> Reference:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)

    @torch.no_grad()
    def logits(token_ids: list[int]) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
        return result

    return logits


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a named family, made at its first use."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[str], Reference]:
    """The transformers twin of a named family."""
    loaded: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in loaded:
            loaded[family] = load_reference(checkpoint(family))
        return loaded[family]

    return get
