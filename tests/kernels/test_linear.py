"""Packed linear layers, RMSNorm and rotary embedding against float64, over odd shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, silu

from gpu_worker.kernels.library import PANEL_DTYPES, Kernels, PackedLinear, pack, pack_scales
from gpu_worker.rope import rotate
from gpu_worker.weight_dtype import rounded

SHAPES = [(1, 1), (3, 5), (16, 16), (17, 31), (64, 100), (129, 48), (259, 83), (576, 191)]  # depth, columns
ROWS = [*range(34), 64, 100]


def made(
    depth: int, columns: int, bias: bool, stored: torch.dtype = torch.float32
) -> tuple[PackedLinear, torch.Tensor, torch.Tensor | None]:
    """A packed layer, and what is left of its weight, and its bias, in float64."""
    weight = torch.randn(columns, depth)
    offset = torch.randn(columns) if bias else None
    scales = pack_scales(weight) if stored is torch.int8 else None
    layer = PackedLinear(pack(weight, stored), offset, columns, scales)
    return layer, rounded(weight, stored).double(), None if offset is None else offset.double()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", PANEL_DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_linear_equals_float64_for_any_shape(
    kernels: Kernels, depth: int, columns: int, bias: bool, stored: torch.dtype
) -> None:
    torch.manual_seed(depth)
    layer, weight, offset = made(depth, columns, bias, stored)
    for rows in ROWS:
        x = torch.randn(rows, depth)
        expected = linear(x.double(), weight, offset)
        out = torch.full((rows, columns), torch.nan)
        kernels.linear(x, layer, out)
        assert_close(out, expected)
        residual = torch.randn(rows, columns)
        out = residual.clone()
        kernels.linear(x, layer, out, add=True)
        assert_close(out, residual.double() + expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("depth", "columns"), SHAPES)
def test_swiglu_equals_float64_for_any_shape(kernels: Kernels, depth: int, columns: int, bias: bool) -> None:
    torch.manual_seed(depth)
    gate, gate_weight, gate_bias = made(depth, columns, bias)
    up, up_weight, up_bias = made(depth, columns, bias)
    for rows in ROWS:
        x = torch.randn(rows, depth)
        out = torch.full((rows, columns), torch.nan)
        kernels.swiglu(x, gate, up, out)
        expected = silu(linear(x.double(), gate_weight, gate_bias)) * linear(x.double(), up_weight, up_bias)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-3)


def test_swiglu_of_extreme_gates_is_finite(kernels: Kernels) -> None:
    x = torch.tensor([[-1e4], [-90.0], [-1e-6], [0.0], [90.0], [1e4]])
    one = PackedLinear(pack(torch.ones(1, 1)), None, 1)
    out = torch.empty(6, 1)
    kernels.swiglu(x, one, one, out)
    torch.testing.assert_close(out.double(), silu(x.double()) * x.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stored", PANEL_DTYPES, ids=str)
def test_a_row_is_bitwise_the_same_in_any_batch_and_with_any_threads(kernels: Kernels, stored: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, gate = made(301, 83, True, stored)[0], made(301, 83, False, stored)[0]
    x = torch.randn(70, 301)
    threads = torch.get_num_threads()

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plain, gated = torch.empty(len(rows), 83), torch.empty(len(rows), 83)
        kernels.linear(rows, layer, plain)
        kernels.swiglu(rows, gate, layer, gated)
        return plain, gated

    whole = run(x)
    try:
        for threads_now, size in [(1, 1), (2, 1), (1, 3), (2, 13), (2, 33), (1, 69)]:
            torch.set_num_threads(threads_now)
            for start in range(0, 70, size):
                for part, all_rows in zip(run(x[start : start + size]), whole, strict=True):
                    assert torch.equal(part, all_rows[start : start + size])
    finally:
        torch.set_num_threads(threads)


def test_fewer_threads_than_asked_for_do_the_work(built: Path) -> None:
    """As under OMP_THREAD_LIMIT or OMP_DYNAMIC: nobody waits for a thread that was never started."""
    script = """if True:
        import sys, torch
        from pathlib import Path
        from gpu_worker.kernels.library import Kernels, PackedLinear, pack
        torch.set_num_threads(2)
        weight, x, out = torch.randn(64, 32), torch.randn(3, 32), torch.empty(3, 64)
        Kernels(Path(sys.argv[1])).linear(x, PackedLinear(pack(weight), None, 64), out)
        torch.testing.assert_close(out, x @ weight.T, rtol=1e-4, atol=1e-4)
    """
    environ = os.environ | {"OMP_THREAD_LIMIT": "1"}
    subprocess.run([sys.executable, "-c", script, str(built)], env=environ, check=True, timeout=60)


def test_strided_rows_and_nothing_beside_the_output_is_written(kernels: Kernels) -> None:
    layer, weight, _ = made(20, 19, False)
    x, out = torch.randn(7, 50), torch.full((7, 40), 3.0)
    kernels.linear(x[:, 11:31], layer, out[:, 5:24])
    assert_close(out[:, 5:24], x[:, 11:31].double() @ weight.T)
    assert bool((out[:, :5] == 3.0).all() and (out[:, 24:] == 3.0).all())


def test_nan_comes_through(kernels: Kernels) -> None:
    layer = made(8, 8, False)[0]
    x, out = torch.full((2, 8), torch.nan), torch.zeros(2, 8)
    kernels.swiglu(x, layer, layer, out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("size", [1, 2, 15, 16, 33, 576])
def test_rms_norm_equals_float64(kernels: Kernels, size: int) -> None:
    for rows in (0, 1, 2, 17, 40):
        x, weight = torch.randn(rows, size), torch.randn(size)
        out = torch.empty(rows, size)
        kernels.rms_norm(x, weight, 1e-5, out)
        x64 = x.double()
        assert_close(out, weight.double() * x64 * torch.rsqrt(x64.square().mean(-1, keepdim=True) + 1e-5))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 64), (6, 1, 10)])
def test_rope_and_write_equal_torch(kernels: Kernels, heads: int, kv_heads: int, head_dim: int, normed: bool) -> None:
    for rows in (1, 5, 40):
        qkv = torch.randn(rows, heads + 2 * kv_heads, head_dim)
        angles = torch.randn(50, head_dim // 2)
        table = angles.cos(), angles.sin()
        positions = torch.randint(50, (rows,))
        cos_sin = table[0][positions, None], table[1][positions, None]
        norms = (torch.randn(head_dim), torch.randn(head_dim)) if normed else None
        q, k, v = (part.clone() for part in torch.split(qkv, [heads, kv_heads, kv_heads], dim=1))
        if norms is not None:
            q, k = (
                w * t * torch.rsqrt(t.square().mean(-1, keepdim=True) + 1e-6)
                for w, t in zip(norms, (q, k), strict=True)
            )
        keys, values = torch.zeros(4, 16, kv_heads, head_dim), torch.zeros(4, 16, kv_heads, head_dim)
        slots = torch.randperm(64)[:rows]
        kernels.rope_and_write(qkv, norms, 1e-6, table, positions, slots, (keys, values))
        torch.testing.assert_close(qkv[:, :heads], rotate(q, *cos_sin), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(keys.flatten(0, 1)[slots], rotate(k, *cos_sin), rtol=1e-5, atol=1e-5)
        assert torch.equal(values.flatten(0, 1)[slots], v)
        assert int((keys.flatten(0, 1).abs().sum((1, 2)) > 0).sum()) == rows
