"""The kernel draws the tokens that torch draws, filter by filter, and faster."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from gpu_worker.kernels.library import Kernels, draw_scratch
from gpu_worker.sampler import DrawnRow, draw_each
from wire.sampling import SamplingParams

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
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


def row(logits: torch.Tensor, uniform: float, **params: Any) -> DrawnRow:
    return DrawnRow(logits, SamplingParams(1, **params), uniform)


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
        check(kernels, [row(r.logits.double() * 1.1, r.uniform, **params) for r in rows])


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
        logits = torch.randn(200, dtype=torch.float64)
        logits[:150] = -math.inf
        tokens = check(kernels, [row(logits, u, **params) for u in uniforms(30, 5)])
        assert all(token is not None and token >= 150 for token in tokens)
        logits[:] = -math.inf
        logits[77] = -1e300
        assert check(kernels, [row(logits, 0.5, **params)]) == [77]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 5, 63, 98])
def test_a_row_without_a_usable_number_gives_no_token(kernels: Kernels, value: float, place: int) -> None:
    logits = torch.randn(99)
    good = row(logits.clone(), 0.5)
    logits[place] = value
    nothing = row(torch.full((99,), -math.inf, dtype=torch.float64), 0.5)
    tokens = kernels.draw([good, row(logits, 0.5), nothing, row(logits.double(), 0.5)], draw_scratch(99))
    assert tokens == [*draw_each([good]), None, None, None]


def test_a_row_is_drawn_alike_alone_and_among_others(kernels: Kernels) -> None:
    torch.manual_seed(6)
    rows = [row(torch.randn(5000), u, **FILTERS[i % len(FILTERS)]) for i, u in enumerate(uniforms(40, 7))]
    scratch = draw_scratch(5000)
    assert kernels.draw(rows, scratch) == [kernels.draw([one], scratch)[0] for one in rows]
