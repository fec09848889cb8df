"""Each row's largest value and its first place, as torch finds them, and faster."""

from __future__ import annotations

import math

import pytest
import torch

from gpu_worker.kernels.library import Kernels
from gpu_worker.sampler import find_largest


def check(kernels: Kernels, values: torch.Tensor) -> None:
    best, columns = kernels.largest(values)
    expected, expected_columns = find_largest(values)
    assert [str(b) for b in best] == [str(e) for e in expected]  # NaN is as good as NaN
    places = zip(best, columns, expected_columns, strict=True)
    assert all(column == wanted for value, column, wanted in places if not math.isnan(value))


@pytest.mark.parametrize("columns", [1, 3, 15, 16, 17, 100, 4095, 4096, 4097, 49152])
def test_random_rows(kernels: Kernels, columns: int) -> None:
    torch.manual_seed(columns)
    for rows in (0, 1, 3, 32):
        check(kernels, torch.randn(rows, columns))


def test_of_equal_ones_the_first(kernels: Kernels) -> None:
    torch.manual_seed(0)
    check(kernels, torch.randint(-3, 3, (40, 9000)).float())
    check(kernels, torch.zeros(2, 9000))
    check(kernels, torch.full((1, 50), -0.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5, 16, 4097, 8999])
def test_what_is_not_finite(kernels: Kernels, value: float, place: int) -> None:
    values = torch.randn(3, 9000)
    values[1, place] = value
    check(kernels, values)
    check(kernels, torch.full((2, 9000), value))


def test_nan_before_infinity(kernels: Kernels) -> None:
    values = torch.zeros(1, 9000)
    values[0, 10], values[0, 8000] = math.inf, math.nan
    best, _ = kernels.largest(values)
    assert math.isnan(best[0])
