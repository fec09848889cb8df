"""FP8 weights and KV against float32, on the CPU: torch casts to e4m3 and multiplies it there too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from gpu_worker.attention.choose import choose
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.float8 import FLOAT8, quantize_rows
from gpu_worker.float8_linear import (
    Float8Linear,
    ScaledMatmul,
    choose_matmul,
    emulated,
    quantize_linears,
    row_scaled,
    tensor_scaled,
)
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.kv_format import Float8KV, PlainKV, choose_kv_format
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import load_decoder_config
from gpu_worker.torch_runner import TorchModelRunner
from gpu_worker.weight_dtype import WeightDtype, choose_weight_dtype
from gpu_worker.weights import load_weights
from tests.model.conftest import Reference
from tests.model.paged import PagedSequences, open_runner
from tests.model.test_families import one_token_each, random_mix, whole
from tests.worker.fake_runner import CARD
from wire.errors import ConfigInvalid

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAMILY = "llama_gqa_tied"
FLOAT32 = WeightDtype(torch.float32, torch.float32, None)


def random_rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_a_rows_error_is_within_half_a_step_of_the_grid(size: float) -> None:
    rows = random_rows(0, 64, 96) * size
    values, scales = quantize_rows(rows)
    error = (values.float() * scales - rows).abs()
    assert values.dtype == FLOAT8
    assert bool((error <= torch.maximum(rows.abs() * 2**-4, scales * 2**-10) * (1 + 1e-5)).all())
    torch.testing.assert_close((values.float() * scales).abs().amax(-1), rows.abs().amax(-1))


def test_a_row_of_zeros_stays_zero_and_no_row_becomes_nan() -> None:
    rows = torch.zeros(2, 32)
    rows[1, 3] = torch.finfo(torch.float32).max
    values, scales = quantize_rows(rows)
    assert torch.equal(values.float() * scales, rows)


@pytest.mark.parametrize("matmul", [row_scaled, tensor_scaled])
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_scaled_matmul_gives_what_its_emulation_gives(matmul: ScaledMatmul, rows: int) -> None:
    x8, x_scale = quantize_rows(random_rows(1, rows, 64) * torch.logspace(-2, 2, rows)[:, None])
    w8, w_scale = quantize_rows(random_rows(2, 48, 64))
    expected = emulated(x8, x_scale, w8, w_scale, torch.float32)
    actual = matmul(x8, x_scale, w8, w_scale, torch.float32)
    # The matmul's own output is bfloat16: 8 bits of mantissa.
    torch.testing.assert_close(actual, expected, rtol=2**-8, atol=float(expected.abs().max()) * 2**-12)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_float8_linear_is_near_the_layer_it_came_from(bias: bool) -> None:
    torch.manual_seed(3)
    linear = nn.Linear(256, 128, bias=bias)
    x = random_rows(4, 32, 256)
    expected = linear(x)
    actual = Float8Linear(linear, emulated)(x)
    # Independent errors of 2^-4 / √3 at most in each factor, over 256 products: 3.6 % of the result's size, doubled.
    assert float((actual - expected).norm() / expected.norm()) < 0.072


@torch.no_grad()
def test_a_row_does_not_depend_on_its_batch_mates() -> None:
    linear = Float8Linear(nn.Linear(64, 32), emulated)
    x = random_rows(5, 6, 64)
    x[0] *= 1e4
    torch.testing.assert_close(linear(x)[1:], linear(x[1:]), rtol=1e-6, atol=1e-6)


def test_where_float8_weights_run() -> None:
    assert choose_matmul(CUDA, (9, 0)) is row_scaled
    assert choose_matmul(CUDA, (10, 0)) is row_scaled
    assert choose_matmul(CUDA, (8, 9)) is tensor_scaled
    for device, capability, reason in ((CUDA, (8, 6), "8.9"), (CPU, None, "CUDA")):
        with pytest.raises(ConfigInvalid, match=rf"PHASEMESH_WEIGHT_DTYPE=float8: .*{reason}"):
            choose_matmul(device, capability)


def test_matrices_with_odd_sides_are_refused_by_name(checkpoint: Callable[[str], Path]) -> None:
    model = CausalLM(load_decoder_config(checkpoint(FAMILY)))
    model.model.layers.get_submodule("1.mlp").up_proj = nn.Linear(64, 100)
    with pytest.raises(ConfigInvalid, match=r"layers\.1\.mlp\.up_proj is 100 x 64"):
        quantize_linears(model, emulated)


def make_runner(directory: Path, *, float8_weights: bool = False, float8_kv: bool = False) -> TorchModelRunner:
    config = load_decoder_config(directory)
    with torch.device("meta"):
        model = CausalLM(config)
    load_weights(model, directory, FLOAT32, CPU)
    if float8_weights:
        quantize_linears(model, emulated)
    kv_format = Float8KV(torch.float32) if float8_kv else PlainKV(torch.float32)
    layout = KVLayout.sized(config, page_size=16, kv_format=kv_format, num_pages=64, memory_bytes=0)
    return TorchModelRunner(CARD, config, model, TorchAttention(kv_format), KVCache(layout, CPU))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize(("float8_weights", "float8_kv", "limit"), [(True, False, 0.2), (False, True, 0.1)])
def test_a_models_logits_stay_near_float32s_however_it_is_split(
    float8_weights: bool,
    float8_kv: bool,
    limit: float,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
) -> None:
    rng = random.Random(6)
    runner = make_runner(checkpoint(FAMILY), float8_weights=float8_weights, float8_kv=float8_kv)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (5, 40, 90)]
    for split in (whole, one_token_each, random_mix(rng)):
        for actual, prompt in zip(PagedSequences(runner, prompts, rng).run(split), prompts, strict=True):
            expected = reference(FAMILY)(prompt)
            assert 1e-4 < relative_error(actual, expected) < limit  # quantized, and nothing worse


def test_float8_kv_rows_survive_the_page() -> None:
    kv_format = Float8KV(torch.bfloat16)
    rows = random_rows(7, 10, 2, 16).to(torch.bfloat16)
    stored = kv_format.encode(rows)
    assert (stored.shape, stored.dtype) == ((10, 2, kv_format.row_size(16)), torch.uint8)
    values, scales = quantize_rows(rows)
    assert torch.equal(kv_format.decode(stored), (values.float() * scales).to(torch.bfloat16))


def test_float8_kv_halves_the_pages(checkpoint: Callable[[str], Path]) -> None:
    config = load_decoder_config(checkpoint(FAMILY))
    for kv_format, row_bytes in ((PlainKV(torch.bfloat16), 32), (Float8KV(torch.bfloat16), 20)):
        layout = KVLayout.sized(config, page_size=16, kv_format=kv_format, num_pages=4, memory_bytes=0)
        assert layout.total_bytes == 2 * 3 * 4 * 16 * 2 * row_bytes


@pytest.mark.parametrize(
    ("checkpoint_dtype", "compute"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
    ],
)
def test_float8_weights_are_other_weights_computed_in_16_bits(
    checkpoint_dtype: torch.dtype, compute: torch.dtype
) -> None:
    expected = WeightDtype(FLOAT8, compute, "float8_e4m3fn")
    assert choose_weight_dtype("float8", checkpoint_dtype, CUDA, kernels=False) == expected


def test_float8_kv_is_read_by_torch_alone() -> None:
    kv_format = choose_kv_format("float8", torch.bfloat16, CUDA, 64)
    assert kv_format == Float8KV(torch.bfloat16)
    assert isinstance(choose("auto", CUDA, torch.bfloat16, head_dim=64, kv_format=kv_format), TorchAttention)
    with pytest.raises(ConfigInvalid, match="PHASEMESH_ATTENTION_BACKEND=flash_attn: reads no float8 KV"):
        choose("flash_attn", CUDA, torch.bfloat16, head_dim=64, kv_format=kv_format)
    with pytest.raises(ConfigInvalid, match="PHASEMESH_KV_DTYPE=float8: needs a head dimension"):
        choose_kv_format("float8", torch.bfloat16, CUDA, 66)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_dtype": "float8"}, "PHASEMESH_WEIGHT_DTYPE='float8': needs a CUDA device, not cpu"),
        ({"kv_dtype": "float8"}, "PHASEMESH_KV_DTYPE=float8: needs a CUDA device, not cpu"),
        ({"kv_dtype": "int4"}, "PHASEMESH_KV_DTYPE='int4': one of auto, float8"),
    ],
)
def test_off_a_gpu_float8_is_refused_by_name(
    changes: dict[str, str], message: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigInvalid, match=message):
        open_runner(checkpoint(FAMILY), **changes)
