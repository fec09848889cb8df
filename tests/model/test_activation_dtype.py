"""Inputs of linear layers rounded to the weights' type: what each option means, and the model that is left."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gpu_worker import model_runner
from gpu_worker.activation_dtype import choose_activation_dtype
from gpu_worker.kernels.build import KernelsUnavailable
from gpu_worker.kernels.library import Kernels
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.weight_dtype import WeightDtype, rounded
from kvstore.prefix_hash import namespace
from tests.kernels.conftest import built  # noqa: F401  # a fixture
from tests.model.checkpoints import make_checkpoint
from tests.model.paged import PagedSequences, open_runner
from tests.model.test_weight_dtype import requantized
from wire.config import ModelConfig, load
from wire.errors import ConfigInvalid
from wire.model_path import cache_root

F32, BF16, I8 = torch.float32, torch.bfloat16, torch.int8
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BOTH = frozenset({BF16, I8})
NONE: frozenset[torch.dtype] = frozenset()
FAMILIES = ("llama_gqa_tied", "llama_biases", "llama_wide_heads", "qwen3_window")
VOCAB = 330  # its last panel is not full


def chosen(option: str, stored: torch.dtype, dots: frozenset[torch.dtype] | None, depth: int = 128) -> WeightDtype:
    weights = WeightDtype(stored, F32, "int8" if stored is I8 else None)
    return choose_activation_dtype(option, weights, CPU, dots=dots, depths=(64, depth, 576))


@pytest.mark.parametrize(
    ("option", "stored", "dots", "depth", "rounding"),
    [
        ("auto", I8, BOTH, 128, "int8-a8"),
        ("auto", I8, frozenset({I8}), 128, "int8-a8"),
        ("int8", I8, BOTH, 128, "int8-a8"),
        ("bfloat16", BF16, BOTH, 128, "bfloat16-a16"),
        ("auto", F32, BOTH, 128, None),
        ("auto", BF16, BOTH, 128, None),
        ("auto", I8, frozenset({BF16}), 128, None),
        ("auto", I8, NONE, 128, None),
        ("auto", I8, None, 128, None),
        ("auto", I8, BOTH, 96, None),
        ("float32", F32, BOTH, 128, None),
        ("float32", BF16, BOTH, 128, None),
        ("float32", I8, BOTH, 96, None),
    ],
)
def test_what_an_option_means(
    option: str,
    stored: torch.dtype,
    dots: frozenset[torch.dtype] | None,
    depth: int,
    rounding: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """rounding None: nothing is rounded but the weights. Where auto would have, it says why not, in one line."""
    with caplog.at_level(logging.INFO):
        result = chosen(option, stored, dots, depth)
    assert (result.stored, result.compute, result.dots) == (stored, F32, rounding is not None)
    assert result.rounding == (rounding or ("int8" if stored is I8 else None))
    falls_back = option == "auto" and stored is I8 and rounding is None
    assert len(caplog.records) == int(falls_back)


@pytest.mark.parametrize(
    ("option", "stored", "dots", "depth", "reason"),
    [
        ("int4", I8, BOTH, 128, "one of auto, float32, bfloat16, int8"),
        ("int8", BF16, BOTH, 128, r"needs weights held as int8 \(PHASEMESH_WEIGHT_DTYPE\), not bfloat16"),
        ("bfloat16", I8, BOTH, 128, r"needs weights held as bfloat16 \(PHASEMESH_WEIGHT_DTYPE\), not int8"),
        ("bfloat16", F32, BOTH, 128, "needs weights held as bfloat16 .*, not float32"),
        ("int8", I8, None, 128, r"needs the CPU kernels, which are off \(PHASEMESH_CPU_KERNELS\), not built"),
        ("int8", I8, frozenset({BF16}), 128, "needs a CPU with AVX512_VNNI, which this one lacks"),
        ("bfloat16", BF16, frozenset({I8}), 128, "needs a CPU with AVX512_BF16, which this one lacks"),
        ("int8", I8, BOTH, 96, "needs linear layers of a depth that is a multiple of 64, not 96"),
        ("bfloat16", BF16, BOTH, 96, "needs linear layers of a depth that is a multiple of 64, not 96"),
    ],
)
def test_what_is_not_possible_is_refused_with_the_reason(
    option: str, stored: torch.dtype, dots: frozenset[torch.dtype] | None, depth: int, reason: str
) -> None:
    with pytest.raises(ConfigInvalid, match=f"^PHASEMESH_ACTIVATION_DTYPE='{option}': {reason}") as refused:
        chosen(option, stored, dots, depth)
    assert refused.value.param == "PHASEMESH_ACTIVATION_DTYPE"


@pytest.mark.parametrize("option", ["float32", "bfloat16", "int8"])
def test_on_a_gpu_only_auto_is_accepted(option: str) -> None:
    weights = WeightDtype(BF16, BF16, None)
    assert choose_activation_dtype("auto", weights, CUDA, dots=None, depths=(96,)) == weights
    with pytest.raises(ConfigInvalid, match=f"PHASEMESH_ACTIVATION_DTYPE='{option}': .*; on cuda only auto"):
        choose_activation_dtype(option, weights, CUDA, dots=None, depths=(64,))


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose depths are multiples of 64."""
    return make_checkpoint(
        tmp_path_factory.mktemp(request.param), request.param, intermediate_size=128, vocab_size=VOCAB
    )


@pytest.fixture(params=["bfloat16", "int8"])
def dtype(request: pytest.FixtureRequest, built: Path) -> str:  # noqa: F811
    """Of weights and inputs; skipped where this CPU has no dot products of it."""
    name: str = request.param
    if getattr(torch, name) not in Kernels(built).dots:
        pytest.skip(f"this CPU has no dot products of {name}")
    return name


def opened(directory: Path, dtype: str, activation_dtype: str) -> PagedModelRunner:
    """With the kernels, whatever PHASEMESH_CPU_KERNELS says."""
    runner = open_runner(
        directory,
        weight_dtype=dtype,
        activation_dtype=activation_dtype,
        kernels_dir=cache_root(load(ModelConfig, os.environ)),
    )
    assert runner.attention_backend == "cpu", "the CPU kernels are not built"
    return runner


def reference(directory: Path, inputs: torch.dtype) -> Callable[[list[int]], torch.Tensor]:
    """transformers in float32, the inputs of every linear layer rounded to a type on their way in."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=F32)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(
                lambda _, args: (rounded(args[0].flatten(0, -2), inputs).view_as(args[0]),)
            )

    @torch.no_grad()
    def logits(prompt: list[int]) -> torch.Tensor:
        result: torch.Tensor = model(torch.tensor([prompt])).logits[0]
        return result

    return logits


def test_logits_are_those_of_rounded_weights_and_rounded_inputs(directory: Path, dtype: str, tmp_path: Path) -> None:
    """Of every token of the vocabulary, six a prompt, and of a long prompt.

    An input so near the middle of two steps that the other is taken there moves all that comes after it by about what
    rounding costs: it may happen, to few.
    """
    rng = random.Random(0)
    tokens = rng.sample(range(VOCAB), VOCAB)
    prompts = [tokens[start : start + 6] for start in range(0, VOCAB, 6)] + [tokens[:70]]
    same_weights = requantized(directory, dtype, tmp_path / "model")
    with_rounding, without = (reference(same_weights, inputs) for inputs in (getattr(torch, dtype), F32))
    results = PagedSequences(opened(directory, dtype, dtype), prompts, rng).run(dict)
    num_same = 0
    for prompt, actual in zip(prompts, results, strict=True):
        wanted, unrounded = with_rounding(prompt), without(prompt)
        cost_of_rounding = (unrounded - wanted).norm()
        assert (actual - wanted).norm() < 2.0 * cost_of_rounding
        assert (actual - unrounded).norm() > 0.6 * cost_of_rounding
        num_same += int((actual - wanted).norm() < 0.01 * cost_of_rounding)
    assert num_same >= 0.8 * len(prompts)


def test_logits_are_bitwise_the_same_alone_batched_and_chunked(
    directory: Path,
    dtype: str,
) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40, 130)]
    runner = opened(directory, dtype, dtype)

    def alone(remaining: dict[int, int]) -> dict[int, int]:
        index = next(iter(remaining))
        return {index: remaining[index]}

    def mixed(remaining: dict[int, int]) -> dict[int, int]:
        members = rng.sample(sorted(remaining), rng.randint(1, len(remaining)))
        return {i: rng.choice([1, min(remaining[i], rng.randint(1, 40))]) for i in members}

    expected = PagedSequences(runner, prompts, rng).run(alone)
    for choose in (dict, mixed, mixed):
        for actual, wanted in zip(PagedSequences(runner, prompts, rng).run(choose), expected, strict=True):
            assert torch.equal(actual, wanted)


def test_rounded_inputs_make_another_revision(directory: Path, dtype: str, tmp_path: Path) -> None:
    """Their KV differs: a cell refuses such a worker, and no prefix is shared with one."""
    bits = 8 * getattr(torch, dtype).itemsize
    for checkpoint in (directory, make_checkpoint(tmp_path, "qwen2", dtype=BF16, intermediate_size=128)):
        cards = [opened(checkpoint, dtype, activations).card for activations in ("float32", dtype)]
        assert len({namespace(card) for card in cards}) == len({card.revision[:12] for card in cards}) == 2
        assert cards[1].revision.endswith(f"-{dtype}-a{bits}")
        assert cards[1].kv_dtype == "float32"
        auto = opened(checkpoint, dtype, "auto").card
        assert auto == cards[1 if dtype == "int8" else 0]


def test_a_cpu_without_the_instructions_falls_back_and_refuses_what_is_asked_for_by_name(
    directory: Path,
    built: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        kernels = Kernels(built, "avx2")
    except KernelsUnavailable as obstacle:
        pytest.skip(str(obstacle))
    monkeypatch.setattr(model_runner, "load_kernels", lambda _: kernels)
    with caplog.at_level(logging.INFO):
        runner = opened(directory, "int8", "auto")
    assert runner.card.revision.endswith("-int8")
    [line] = [record for record in caplog.records if record.name == "gpu_worker.activation_dtype"]
    assert line.levelno == logging.INFO and "AVX512_VNNI" in line.getMessage()
    for dtype in ("bfloat16", "int8"):
        with pytest.raises(ConfigInvalid, match=f"PHASEMESH_ACTIVATION_DTYPE='{dtype}': needs a CPU with AVX512_"):
            opened(directory, dtype, dtype)


def test_without_the_kernels_inputs_stay_as_they_are(directory: Path) -> None:
    auto, as_they_are = (
        open_runner(directory, weight_dtype="int8", activation_dtype=option, kernels_dir=None).card
        for option in ("auto", "float32")
    )
    assert auto == as_they_are
    with pytest.raises(ConfigInvalid, match="PHASEMESH_ACTIVATION_DTYPE='int8': needs the CPU kernels"):
        open_runner(directory, weight_dtype="int8", activation_dtype="int8", kernels_dir=None)
