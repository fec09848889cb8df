"""What every suite shares: the real model's directory, and figures that are printed though their tests pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from phasemesh import models
from phasemesh.progress import Progress
from wire.config import ModelConfig, load

DEFAULT_MODEL = "smollm2-135m-instruct"


FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def report_figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Prints a measured or counted figure, with the test's name, at the end of the run."""

    def report(figure: str) -> None:
        request.config.stash.setdefault(FIGURES, []).append(f"{request.node.name}: {figure}")

    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    figures = config.stash.get(FIGURES, [])
    if figures:
        terminalreporter.section("figures")
        for figure in figures:
            terminalreporter.line(figure)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory; fetched and converted the first time."""
    return models.pull(load(ModelConfig, os.environ), DEFAULT_MODEL, Progress())
