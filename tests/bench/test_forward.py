"""bench.forward: what a case asks of a runner, and that every arm does it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bench.forward import Case, compare, measure
from bench.perplexity import open_runners
from tests.model.conftest import checkpoint  # noqa: F401  # a fixture
from wire.config import WorkerConfig, load


def test_a_case_is_the_last_tokens_of_its_contexts() -> None:
    batch = Case.parse("2x3@20").batch(page_size=16, vocab_size=100)
    assert batch.positions == [17, 18, 19] * 2
    assert batch.slot_mapping == [17, 18, 19, 49, 50, 51]
    assert (batch.query_lens, batch.context_lens, batch.logit_rows) == ([3, 3], [20, 20], [2, 5])
    assert batch.block_tables == [[0, 1], [2, 3]]


@pytest.mark.parametrize("text", ["", "1x1", "0x1@1", "1x0@1", "1x2@1", "1x1@1 ", "-1x1@1", "axb@c"])
def test_what_is_no_case(text: str) -> None:
    with pytest.raises(ValueError, match="SEQUENCESxTOKENS@CONTEXT"):
        Case.parse(text)


def test_every_arm_is_measured(checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    config = load(WorkerConfig, os.environ)
    config = replace(config, model=replace(config.model, model=str(checkpoint("llama_gqa_tied"))))
    runners, _ = open_runners(config, 400)
    taken = measure(runners, Case(2, 1, 100), rounds=1)
    assert taken.keys() == runners.keys()
    assert min(taken.values()) > 0
    compare(config, [Case(3, 2, 40)], rounds=1)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].split()[:5] == ["3", "×", "2", "@", "40"]
    assert len(printed[-1].split()) == 5 + len(runners)
