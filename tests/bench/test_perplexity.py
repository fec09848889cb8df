"""bench.perplexity: its sums against transformers' own, and what int8 and bfloat16 cost the real model."""

from __future__ import annotations

import math
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench import perplexity
from bench.perplexity import REFERENCE, TEXT, Score, score
from gpu_worker.paged_runner import PagedModelRunner
from tests.model.conftest import checkpoint, load_reference  # noqa: F401  # fixtures
from wire.config import WorkerConfig, load


def runners_of(directory: Path, window: int) -> dict[str, PagedModelRunner]:
    config = load(WorkerConfig, os.environ)
    config = replace(config, model=replace(config.model, model=str(directory)))
    return perplexity.open_runners(config, window)[0]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two that wait for each other take far longer than one, as soon as something else wants a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_perplexity_is_transformers_of_every_window(checkpoint: Callable[[str], Path]) -> None:  # noqa: F811
    rng = random.Random(0)
    directory = checkpoint("llama_gqa_tied")
    tokens = [rng.randrange(320) for _ in range(500)]
    scores = score(runners_of(directory, 300), tokens, window=300)
    loss = 0.0
    for part in (tokens[:300], tokens[300:]):
        logprobs = load_reference(directory)(part).double().log_softmax(-1)
        loss -= float(logprobs[range(len(part) - 1), part[1:]].sum())
    reference = scores[REFERENCE]
    assert [counted.tokens for counted in scores.values()] == [498] * 3
    assert math.isclose(reference.perplexity, math.exp(loss / 498), rel_tol=1e-4)
    assert (reference.divergence, reference.same_choice) == (0.0, 498)
    assert 0 < scores["bfloat16"].divergence < scores["int8"].divergence
    assert scores.keys() == {REFERENCE, "bfloat16", "int8"}, "no inputs are rounded at a depth of 96"


def test_divergence_by_hand() -> None:
    counted = Score()
    even, uneven = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    counted.add(even, uneven, torch.tensor([1]))
    assert math.isclose(counted.perplexity, 2.0)
    assert math.isclose(counted.divergence, 0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel_tol=1e-6)
    assert counted.same_choice == 1  # of equal logits the first is taken


def test_fewer_bits_cost_the_real_model_little(smollm2_dir: Path, report_figure: Callable[[str], None]) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    tokens = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[:513]
    scores = score(runners_of(smollm2_dir, 513), tokens, window=513)
    bounds = {
        "bfloat16": (2e-4, 0.985),
        "int8": (3e-3, 0.95),
        "bfloat16, inputs too": (4e-4, 0.98),
        "int8, inputs too": (1e-2, 0.93),
    }
    for name in list(scores)[1:]:
        most_divergence, least_same = bounds[name]
        counted = scores[name]
        ratio = counted.perplexity / scores[REFERENCE].perplexity
        report_figure(f"{name}: perplexity × {ratio:.5f}, KL {counted.divergence / counted.tokens:.1e}")
        assert abs(ratio - 1) < 0.01
        assert counted.divergence / counted.tokens < most_divergence
        assert counted.same_choice / counted.tokens > least_same


def test_the_command_prints_every_type_and_names_what_it_cannot_read(
    checkpoint: Callable[[str], Path],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(text: Path) -> None:
        model = str(checkpoint("qwen2"))
        monkeypatch.setattr(sys, "argv", ["perplexity", "--model", model, "--text", str(text), "--threads", "1"])
        perplexity.main()

    text = tmp_path / "text.txt"
    with pytest.raises(SystemExit):
        run(text)
    assert "text.txt: no such file" in capsys.readouterr().err
    text.write_text("a")
    with pytest.raises(SystemExit):
        run(text)
    assert "1 tokens" in capsys.readouterr().err
    text.write_text("pack my box with the lazy dog")
    run(text)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert rows == ["| weights", "| float32", "| bfloat16", "| int8"]
    left_out = [line for line in lines if line.startswith("not run")]
    assert [line.split(":")[1] for line in left_out] == [" bfloat16, inputs too", " int8, inputs too"]
    assert all("PHASEMESH_ACTIVATION_DTYPE" in line for line in left_out)
