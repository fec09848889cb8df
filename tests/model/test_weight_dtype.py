"""Weights held in fewer bits: what each option means, the int8 grid, and the model that is left."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gpu_worker.weight_dtype import choose_weight_dtype, dequantize, quantize, rounded
from gpu_worker.weights import EMBEDDING, HEAD, SINGLE_FILE, checkpoint_dtype
from kvstore.prefix_hash import namespace
from tests.model.checkpoints import FAMILIES, make_checkpoint
from tests.model.conftest import load_reference
from tests.model.paged import PagedSequences, open_runner
from wire.errors import ConfigInvalid

F32, F16, BF16, I8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("option", "checkpoint", "device", "kernels", "stored", "rounding"),
    [
        ("auto", F32, CPU, True, F32, None),
        ("auto", F16, CPU, True, F32, None),
        ("auto", BF16, CPU, True, BF16, None),
        ("auto", BF16, CPU, False, F32, None),
        ("float32", BF16, CPU, True, F32, None),
        ("bfloat16", F32, CPU, True, BF16, "bfloat16"),
        ("bfloat16", F16, CPU, False, BF16, "bfloat16"),
        ("bfloat16", BF16, CPU, False, BF16, None),
        ("int8", F32, CPU, True, I8, "int8"),
        ("int8", BF16, CPU, False, I8, "int8"),
        ("auto", F32, CUDA, False, F32, None),
        ("auto", F16, CUDA, False, F16, None),
        ("auto", BF16, CUDA, False, BF16, None),
        ("float32", BF16, CUDA, False, F32, None),
        ("bfloat16", F32, CUDA, False, BF16, "bfloat16"),
    ],
)
def test_what_an_option_means(
    option: str,
    checkpoint: torch.dtype,
    device: torch.device,
    kernels: bool,
    stored: torch.dtype,
    rounding: str | None,
) -> None:
    chosen = choose_weight_dtype(option, checkpoint, device, kernels=kernels)
    assert (chosen.stored, chosen.rounding) == (stored, rounding)
    assert chosen.compute is (F32 if device is CPU else stored)


@pytest.mark.parametrize(("option", "device"), [("int4", CPU), ("float16", CPU), ("int8", CUDA)])
def test_what_is_not_implemented_is_refused_by_the_variables_name(option: str, device: torch.device) -> None:
    with pytest.raises(ConfigInvalid, match=f"PHASEMESH_WEIGHT_DTYPE='{option}': .*bfloat16") as refused:
        choose_weight_dtype(option, F32, device, kernels=False)
    assert refused.value.param == "PHASEMESH_WEIGHT_DTYPE"


def test_a_worker_refuses_what_is_not_implemented(checkpoint: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigInvalid, match="PHASEMESH_WEIGHT_DTYPE"):
        open_runner(checkpoint("llama_mha"), weight_dtype="int4")


def test_int8_by_hand() -> None:
    """Two groups in a row; the second one's scale is its own. 0.5 and 1.5 steps go to the even neighbour."""
    weight = torch.zeros(2, 66)
    weight[0, :5] = torch.tensor([127.0, -127.0, 0.5, 1.5, -2.4])
    weight[0, 64:] = torch.tensor([1.0, -0.5])
    steps, scales = quantize(weight)
    assert (steps.dtype, scales.dtype, scales.shape) == (I8, F32, (2, 2))
    assert steps[0, :5].tolist() == [127, -127, 0, 2, -2]
    assert steps[0, 64:].tolist() == [127, -64]
    assert scales[0].tolist() == [1.0, torch.tensor(1.0).div(127).item()]
    assert not steps[1].any() and not scales[1].any()
    assert torch.equal(dequantize(steps, scales)[0, :5], torch.tensor([127.0, -127.0, 0.0, 2.0, -2.0]))


@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 2**32 - 1), st.sampled_from([1e-38, 1e-3, 1.0, 1e30]))
def test_int8_is_within_half_a_step(columns: int, depth: int, seed: int, size: float) -> None:
    weight = torch.randn(columns, depth, generator=torch.Generator().manual_seed(seed)) * size
    steps, scales = quantize(weight)
    assert int(steps.abs().max()) <= 127 and not bool((steps == -128).any())
    for group in range(scales.shape[1]):
        part = slice(64 * group, 64 * group + 64)
        error = (dequantize(steps, scales)[:, part].double() - weight[:, part].double()).abs().amax(1)
        assert bool((error <= (0.5 + 1e-4) * scales[:, group].double() + 1e-43).all())
        assert torch.equal(scales[:, group], weight[:, part].abs().amax(1) / 127)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_is_not_finite_is_nan_and_no_other_is(value: float) -> None:
    weight = torch.randn(2, 128)
    weight[1, 100] = value
    result = rounded(weight, I8)
    assert bool(result[1, 64:].isnan().all() and result[0].isfinite().all() and result[1, :64].isfinite().all())


def on_int8_grid(row: torch.Tensor) -> torch.Tensor:
    """The documented grid, written down a second time."""
    parts = []
    for group in torch.split(row, 64):
        scale = group.abs().max() / 127
        parts.append(torch.round(group / scale) * scale)
    return torch.cat(parts)


def requantized(directory: Path, stored: str, target: Path) -> Path:
    """A copy of a float32 checkpoint that holds exactly the values a worker computes with."""
    shutil.copytree(directory, target)
    tensors = load_file(directory / SINGLE_FILE)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            to_bfloat16 = stored == "bfloat16" or (name == EMBEDDING and HEAD in tensors)
            tensors[name] = tensor.bfloat16().float() if to_bfloat16 else torch.stack(list(map(on_int8_grid, tensor)))
    save_file(tensors, target / SINGLE_FILE, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_rounded_weights_in_float32(
    family: str, stored: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of every family, untied and tied, on whichever path PHASEMESH_CPU_KERNELS takes."""
    reference = load_reference(requantized(checkpoint(family), stored, tmp_path / "model"))
    rng = random.Random(family)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (1, 40)]
    runner = open_runner(checkpoint(family), weight_dtype=stored)
    assert runner.card.kv_dtype == "float32"
    for prompt, actual in zip(prompts, PagedSequences(runner, prompts, rng).run(dict), strict=True):
        torch.testing.assert_close(actual, reference(prompt), rtol=1e-4, atol=2e-4)


def test_weights_rounded_to_another_type_are_other_weights(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Their KV differs: a cell refuses such a worker, and no prefix is shared with one."""
    cards = {
        dtype: open_runner(checkpoint("qwen3"), weight_dtype=dtype).card for dtype in ("float32", "bfloat16", "int8")
    }
    assert open_runner(checkpoint("qwen3")).card == cards["float32"]
    assert (
        len({namespace(card) for card in cards.values()}) == len({card.revision[:12] for card in cards.values()}) == 3
    )
    assert cards["int8"].revision.endswith("-int8") and cards["bfloat16"].revision.endswith("-bfloat16")

    narrow = make_checkpoint(tmp_path, "qwen3", dtype=BF16)
    same = {open_runner(narrow, weight_dtype=dtype).card for dtype in ("auto", "float32", "bfloat16")}
    assert len(same) == 1, "bfloat16 holds every value of a bfloat16 checkpoint"


def test_the_type_of_a_checkpoint_holds_every_matrix(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("llama_mha"), directory)
    tensors = load_file(directory / SINGLE_FILE)

    def found(**others: torch.dtype) -> torch.dtype:
        """Of a checkpoint in bfloat16 but for its norms and `others`."""
        changed = {
            name: tensor.to(others.get(name.split(".")[-2], F32 if tensor.dim() == 1 else BF16))
            for name, tensor in tensors.items()
        }
        save_file(changed, directory / SINGLE_FILE, metadata={"format": "pt"})
        return checkpoint_dtype(directory)

    assert checkpoint_dtype(directory) is F32
    assert found() is BF16
    assert found(up_proj=F32) is F32
    assert found(up_proj=F16) is F32
