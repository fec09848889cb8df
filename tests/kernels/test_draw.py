"""The kernel draws the tokens that torch draws, filter by filter."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from gpu_worker.kernels.drawing import draw_scratch
from gpu_worker.kernels.library import Kernels
from gpu_worker.sampler import DrawnRow, draw_each, sample
from tests.worker.fake_runner import CARD
from tests.worker.plans import live
from tests.worker.test_sampler import CASES, OUTPUT, PROMPT, VOCAB, random_logits
from wire.sampling import SamplingParams

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e-5, "top_k": 7},
    {"temperature": 0.1, "top_k": 50},
    {"temperature": 0.01, "top_k": 900, "top_p": 0.9},
    {"temperature": 100.0, "top_p": 0.9},
    {"temperature": 1e4, "top_p": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.999999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 500, "top_p": 0.99, "min_p": 0.01},
    {"temperature": 0.0},
]


def row(logits: torch.Tensor, uniform: float, masked: Sequence[int] = (), **params: Any) -> DrawnRow:
    return DrawnRow(logits, live([0], sampling=SamplingParams(1, **params)), masked, uniform)


def check(kernels: Kernels, rows: list[DrawnRow]) -> list[int | None]:
    tokens = kernels.draw(rows, draw_scratch(len(rows[0].logits)))
    assert tokens == draw_each(rows)
    return tokens


def uniforms(count: int, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [0.0, 1.0 - 2.0**-30, *(rng.random() for _ in range(count - 2))]


@pytest.mark.parametrize("columns", [1, 3, 15, 17, 64, 1000, 4099])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_random_rows(kernels: Kernels, columns: int, params: dict[str, Any]) -> None:
    torch.manual_seed(columns)
    for spread in (0.1, 3.0, 30.0):
        rows = [row(torch.randn(columns) * spread, u, **params) for u in uniforms(12, columns)]
        check(kernels, rows)
        check(kernels, [row(r.logits, r.uniform, repetition_penalty=1.3, **params) for r in rows])


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_a_whole_vocabulary_as_models_have_it(kernels: Kernels, params: dict[str, Any]) -> None:
    torch.manual_seed(1)
    logits = torch.randn(49_152) * 2 - 5
    logits[torch.randint(0, 49_152, (30,))] = torch.linspace(5, 15, 30)
    check(kernels, [row(logits, u, **params) for u in uniforms(40, 2)])


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_ties_go_to_the_lowest_ids(kernels: Kernels, params: dict[str, Any]) -> None:
    torch.manual_seed(2)
    levels = torch.randint(-3, 3, (300,)).float()
    check(kernels, [row(levels, u, **params) for u in uniforms(60, 3)])
    check(kernels, [row(torch.zeros(256), u, **params) for u in uniforms(30, 4)])
    half = [row(torch.zeros(4), u, top_p=0.5) for u in (0.0, 0.4, 0.6, 0.99)]
    assert check(kernels, half) == [0, 0, 1, 1]


def test_what_is_masked_is_never_drawn(kernels: Kernels) -> None:
    for params in FILTERS:
        logits = torch.randn(200)
        logits[:100] = -math.inf  # fewer are left than some top_k
        tokens = check(kernels, [row(logits, u, range(100, 150), **params) for u in uniforms(30, 5)])
        assert all(token is not None and token >= 150 for token in tokens)
        logits[77] = -1e38
        assert check(kernels, [row(logits, 0.5, range(100, 200), **params)]) == [77]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, 63, 98])
def test_a_row_without_a_usable_number_gives_no_token(kernels: Kernels, value: float, place: int) -> None:
    logits = torch.randn(99)
    good = row(logits.clone(), 0.5)
    logits[place] = value
    nothing = row(torch.zeros(99), 0.5, range(99))
    tokens = kernels.draw([good, row(logits, 0.5), nothing], draw_scratch(99))
    assert tokens == [*draw_each([good]), None, None]


def test_a_row_is_drawn_alike_alone_and_among_others(kernels: Kernels) -> None:
    torch.manual_seed(6)
    rows = [row(torch.randn(5000), u, **FILTERS[i % len(FILTERS)]) for i, u in enumerate(uniforms(40, 7))]
    scratch = draw_scratch(5000)
    assert kernels.draw(rows, scratch) == [kernels.draw([one], scratch)[0] for one in rows]


def test_any_temperature_draws_something(kernels: Kernels) -> None:
    logits = torch.randn(500)
    for temperature in (5e-324, 1e-300, 1e-30, 1e30, 1e300):
        rows = [row(logits, u, temperature=temperature, top_k=100, top_p=0.9) for u in uniforms(9, 10)]
        tokens = kernels.draw(rows, draw_scratch(500))
        assert all(token is not None for token in tokens)
        if temperature < 1:
            assert set(tokens) == {int(logits.argmax())}


def test_one_far_above_all_others(kernels: Kernels) -> None:
    torch.manual_seed(8)
    for lead in (30.0, 100.0, 1e6, 1e38):
        logits = torch.randn(3000)
        logits[1234] += lead
        for params in FILTERS:
            check(kernels, [row(logits, u, **params) for u in uniforms(6, 9)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_sampling_by_the_kernel_is_sampling_by_torch(
    kernels: Kernels, params: SamplingParams, temperature: float
) -> None:
    """Bias, masks, penalties and log-probabilities too."""
    logits = random_logits(12, 30, VOCAB)
    kinds = [replace(params, seed=seed, logprobs=seed % 3 or None) for seed in range(30)]
    sequences = [
        live(PROMPT + OUTPUT, len(PROMPT), sampling=replace(p, temperature=temperature * p.temperature)) for p in kinds
    ]
    drawn = sample(logits, sequences, CARD, kernels.largest, partial(kernels.draw, scratch=draw_scratch(VOCAB)))
    assert drawn == sample(logits, sequences, CARD)


def test_shapes_are_asserted(kernels: Kernels) -> None:
    good, scratch = row(torch.zeros(50), 0.5), draw_scratch(50)
    for bad in (torch.zeros(49), torch.zeros(50, dtype=torch.float64), torch.zeros(100)[::2]):
        with pytest.raises(AssertionError):
            kernels.draw([good, row(bad, 0.5)], scratch)
    with pytest.raises(AssertionError):
        kernels.draw([good], draw_scratch(49))
