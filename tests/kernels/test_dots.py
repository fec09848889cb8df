"""Linear layers whose inputs are rounded to the weights' type, against float64 of the same rounded values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, silu

from gpu_worker.kernels.build import KernelsUnavailable
from gpu_worker.kernels.library import Kernels, PackedLinear, pack_dots, pack_scales
from gpu_worker.weight_dtype import quantize, rounded

BF16, I8 = torch.bfloat16, torch.int8
ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 31, 64, 130)
SHAPES = [(depth, columns) for depth in (64, 576, 1536) for columns in (16, 40, 576)]
CPU_INFO = Path("/proc/cpuinfo")


@pytest.fixture(scope="module")
def best(built: Path) -> Kernels:
    return Kernels(built)


@pytest.fixture(scope="module", params=[BF16, I8], ids=str)
def stored(request: pytest.FixtureRequest, best: Kernels) -> torch.dtype:
    """A type of inputs and weights; skipped where this CPU has no dot products of it."""
    dtype: torch.dtype = request.param
    if dtype not in best.dots:
        pytest.skip(f"this CPU has no dot products of {dtype}")
    return dtype


@dataclass
class Layer:
    """A packed layer, and what is left of its weight, in float64."""

    packed: PackedLinear
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def random(cls, depth: int, columns: int, stored: torch.dtype, *, bias: bool = False) -> Layer:
        offset = torch.randn(columns) if bias else None
        return cls.of(torch.randn(columns, depth), stored, offset)

    @classmethod
    def of(cls, weight: torch.Tensor, stored: torch.dtype, bias: torch.Tensor | None = None) -> Layer:
        scales = pack_scales(weight) if stored is I8 else None
        packed = PackedLinear(pack_dots(weight, stored), bias, len(weight), scales)
        return cls(packed, exact(weight, stored), None if bias is None else bias.double())

    def expected(self, x: torch.Tensor, stored: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of x [rows, depth] in float64, and how far off float32 sums of them may be."""
        left = exact(x, stored)
        sizes = linear(left.abs(), self.weight.abs(), None if self.bias is None else self.bias.abs())
        return linear(left, self.weight, self.bias), 1e-5 * sizes + linear(undecided(x, stored), self.weight.abs())


def exact(matrix: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """[rows, depth] → what is left of it when rounded, in float64; weights and inputs alike."""
    if stored is BF16:
        return matrix.bfloat16().double()
    steps, scales = quantize(matrix)
    return steps.double() * scales.double().repeat_interleave(64, dim=1)


def undecided(x: torch.Tensor, stored: torch.dtype) -> torch.Tensor:
    """[rows, depth] → one step of each int8 input that lies so near the middle of two that a float32 quotient may round
    to either, and 0 of all others."""
    if stored is BF16:
        return torch.zeros_like(x, dtype=torch.float64)
    scales = quantize(x)[1].double().repeat_interleave(64, dim=1)
    steps = x.double() / scales
    return torch.where((steps - steps.floor() - 0.5).abs() < 1e-4, scales, 0.0)


def assert_within(actual: torch.Tensor, expected: torch.Tensor, allowed: torch.Tensor) -> None:
    error = (actual.double() - expected).abs()
    assert bool((error <= allowed).all()), f"{float((error / allowed).max()):.3g} times what is allowed"


def run(kernels: Kernels, x: torch.Tensor, layer: Layer) -> torch.Tensor:
    out = torch.full((len(x), layer.packed.columns), torch.nan)
    kernels.linear(x, layer.packed, out)
    return out


@pytest.mark.skipif(not CPU_INFO.exists(), reason="reads /proc/cpuinfo")
def test_the_types_are_those_the_cpu_has_instructions_for(best: Kernels) -> None:
    lines = (line for line in CPU_INFO.read_text().splitlines() if line.startswith("flags"))
    flags = set(next(lines, "").split())
    has_avx512 = best.instruction_set == "avx512"
    assert (BF16 in best.dots) == (has_avx512 and "avx512_bf16" in flags)
    assert (I8 in best.dots) == (has_avx512 and "avx512_vnni" in flags)


def test_another_instruction_set_has_none(built: Path) -> None:
    for name in ("avx2", "baseline"):
        try:
            assert Kernels(built, name).dots == frozenset()
        except KernelsUnavailable as obstacle:
            assert name == "avx2", obstacle


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_linear_equals_float64_of_the_rounded_inputs(
    best: Kernels, stored: torch.dtype, depth: int, columns: int, bias: bool
) -> None:
    torch.manual_seed(depth + columns)
    layer = Layer.random(depth, columns, stored, bias=bias)
    for rows in ROWS:
        x = torch.randn(rows, depth) * torch.logspace(-3, 3, rows)[:, None]
        expected, allowed = layer.expected(x, stored)
        assert_within(run(best, x, layer), expected, allowed)
        residual = torch.randn(rows, columns)
        out = residual.clone()
        best.linear(x, layer.packed, out, add=True)
        assert_within(out, residual.double() + expected, allowed + 1e-5 * residual.abs())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_swiglu_equals_float64_of_the_rounded_inputs(
    best: Kernels, stored: torch.dtype, depth: int, columns: int, bias: bool
) -> None:
    torch.manual_seed(depth + columns)
    gate, up = (Layer.random(depth, columns, stored, bias=bias) for _ in range(2))
    for rows in ROWS:
        x = torch.randn(rows, depth) / depth**0.5
        out = torch.full((rows, columns), torch.nan)
        best.swiglu(x, gate.packed, up.packed, out)
        (gated, gate_off), (value, up_off) = gate.expected(x, stored), up.expected(x, stored)
        slope = 1.1  # silu's steepest
        allowed = slope * gate_off * value.abs() + silu(gated).abs() * up_off + 1e-6
        assert_within(out, silu(gated) * value, allowed)


def test_inputs_are_rounded_to_the_nearest_and_to_even(best: Kernels, stored: torch.dtype) -> None:
    """Through the identity the rounded inputs come out themselves."""
    torch.manual_seed(0)
    x = torch.randn(40, 64)
    x[0] = torch.arange(64) + 0.5  # int8: ties, once the scale is 1
    x[0, 63] = 127.0
    x[1] = 1 + torch.arange(64) * 2.0**-8  # bfloat16: every other one is a tie
    identity = Layer.of(torch.eye(64), stored)
    wanted = rounded(x, stored)
    assert not torch.equal(wanted, x)
    torch.testing.assert_close(run(best, x, identity), wanted, rtol=1e-6, atol=0.0)


def test_each_64_of_a_row_has_its_own_scale(best: Kernels) -> None:
    if I8 not in best.dots:
        pytest.skip("this CPU has no dot products of int8")
    x = torch.randn(3, 192)
    x[:, 64:128] *= 1e6
    weight = torch.randn(16, 192)
    weight[:, 64:128] = 0.0
    layer = Layer.of(weight, I8)
    expected, allowed = layer.expected(x, I8)
    assert_within(run(best, x, layer), expected, allowed)


def test_a_row_is_bitwise_the_same_in_any_batch_and_with_any_threads(best: Kernels, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    num_rows = 130
    layer, gate = Layer.random(320, 83, stored, bias=True).packed, Layer.random(320, 83, stored).packed
    x = torch.randn(num_rows, 320)
    threads = torch.get_num_threads()

    def results(rows: torch.Tensor) -> list[torch.Tensor]:
        plain, gated, added = (torch.full((len(rows), 83), fill) for fill in (torch.nan, torch.nan, 0.5))
        best.linear(rows, layer, plain)
        best.swiglu(rows, gate, layer, gated)
        best.linear(rows, layer, added, add=True)
        return [plain, gated, added]

    try:
        torch.set_num_threads(1)
        whole = results(x)
        for size in (1, 2, 3, 5, 7, 12, 13, 31, 64, 129, num_rows):
            for threads_now in (1, 2):
                torch.set_num_threads(threads_now)
                for start in range(0, num_rows, size):
                    for part, all_rows in zip(results(x[start : start + size]), whole, strict=True):
                        assert torch.equal(part, all_rows[start : start + size])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_rows", [4, 12, 70])
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30])
def test_a_row_of_zeros_or_of_another_size_is_right_and_leaves_the_others_alone(
    best: Kernels, stored: torch.dtype, factor: float, num_rows: int
) -> None:
    torch.manual_seed(0)
    layer = Layer.random(576, 40, stored, bias=True)
    x = torch.randn(num_rows, 576)
    before = run(best, x, layer)
    for row in (0, num_rows // 2, num_rows - 1):
        changed, others = x.clone(), torch.arange(num_rows) != row
        changed[row] *= factor
        after = run(best, changed, layer)
        assert torch.equal(after[others], before[others])
        expected, allowed = layer.expected(changed[row : row + 1], stored)
        assert_within(after[row : row + 1], expected, allowed)
        assert torch.equal(after[row : row + 1], run(best, changed[row : row + 1], layer))


@pytest.mark.parametrize("factor", [1e-36, 1e-37, 1e-38, 1e-40])
def test_values_too_small_to_have_a_scale_are_never_blown_up(best: Kernels, stored: torch.dtype, factor: float) -> None:
    torch.manual_seed(0)
    layer = Layer.random(576, 40, stored, bias=False)
    x = torch.randn(12, 576) * factor
    most = x.double().abs() @ layer.weight.double().abs().T
    assert torch.all(run(best, x, layer).double().abs() <= 1.1 * most)


@pytest.mark.parametrize("num_rows", [1, 4, 12, 70])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_shows_and_leaves_the_others_alone(
    best: Kernels, stored: torch.dtype, value: float, num_rows: int
) -> None:
    torch.manual_seed(0)
    layer = Layer.random(576, 40, stored, bias=True)
    x = torch.randn(num_rows, 576)
    before = run(best, x, layer)
    for row in {0, num_rows // 2, num_rows - 1}:
        for position in (0, 300, 575):
            changed, others = x.clone(), torch.arange(num_rows) != row
            changed[row, position] = value
            after = run(best, changed, layer)
            assert torch.equal(after[others], before[others])
            assert not bool(after[row].isfinite().any())


def test_strided_rows_and_nothing_beside_the_output_is_written(best: Kernels, stored: torch.dtype) -> None:
    layer = Layer.random(64, 19, stored)
    for rows in (1, 7, 40):
        x, out = torch.randn(rows, 90), torch.full((rows, 40), 3.0)
        best.linear(x[:, 11:75], layer.packed, out[:, 5:24])
        expected, allowed = layer.expected(x[:, 11:75], stored)
        assert_within(out[:, 5:24], expected, allowed)
        assert bool((out[:, :5] == 3.0).all() and (out[:, 24:] == 3.0).all())


def test_no_rows(best: Kernels, stored: torch.dtype) -> None:
    assert run(best, torch.empty(0, 64), Layer.random(64, 16, stored)).shape == (0, 16)
