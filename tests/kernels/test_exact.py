"""Design §6 on the real model: logits are bitwise the same alone, batched, chunked and resumed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from gpu_worker.kernels.library import PANEL_DTYPES, Kernels
from gpu_worker.paged_runner import PagedModelRunner
from tests.model.paged import PagedSequences, open_runner

LENGTHS = (1, 17, 40, 130, 290)


DOTS = (("bfloat16", "bfloat16"), ("int8", "int8"))
"""Weights and inputs of linear layers of the same type."""


@pytest.fixture(
    scope="module",
    params=[*((str(dtype).removeprefix("torch."), "float32") for dtype in PANEL_DTYPES), *DOTS],
    ids="-".join,
)
def runner(request: pytest.FixtureRequest, built: Path, smollm2_dir: Path) -> PagedModelRunner:
    """With every type of weights that the kernels read, and every one that this CPU multiplies by its own kind."""
    weight_dtype, activation_dtype = request.param
    if request.param in DOTS and getattr(torch, weight_dtype) not in Kernels(built).dots:
        pytest.skip(f"this CPU has no dot products of {weight_dtype}")
    opened = open_runner(smollm2_dir, num_pages=128, weight_dtype=weight_dtype, activation_dtype=activation_dtype)
    assert opened.attention_backend == "cpu", "the CPU kernels are off or not built"
    return opened


def alone(remaining: dict[int, int]) -> dict[int, int]:
    index = next(iter(remaining))
    return {index: remaining[index]}


def decodes_at_the_end(remaining: dict[int, int]) -> dict[int, int]:
    """All together: chunks up to the last ten tokens of each, then those one by one."""
    return {i: left - 10 if left > 10 else 1 for i, left in remaining.items()}


def test_logits_are_bitwise_the_same_however_the_work_is_split(runner: PagedModelRunner) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(49152) for _ in range(length)] for length in LENGTHS]

    def mixed(remaining: dict[int, int]) -> dict[int, int]:
        members = rng.sample(sorted(remaining), rng.randint(1, len(remaining)))
        return {i: rng.choice([1, min(remaining[i], rng.randint(1, 90))]) for i in members}

    expected = PagedSequences(runner, prompts, rng).run(alone)
    threads = torch.get_num_threads()
    try:
        for choose, threads_now in ((decodes_at_the_end, 2), (mixed, 1)):
            torch.set_num_threads(threads_now)
            for actual, wanted in zip(PagedSequences(runner, prompts, rng).run(choose), expected, strict=True):
                assert torch.equal(actual, wanted)
    finally:
        torch.set_num_threads(threads)


def test_a_chunk_may_stand_on_another_one_of_its_step(runner: PagedModelRunner) -> None:
    """Its first two pages are written in the same step: in each layer, before anything attends."""
    rng = random.Random(2)
    tokens = [rng.randrange(49152) for _ in range(50)]
    expected = PagedSequences(runner, [tokens], rng).step({0: 50})[0][1]
    both = PagedSequences(runner, [tokens, tokens], rng)
    both.sequences[1].block_table[:2] = both.sequences[0].block_table[:2]
    both.sequences[1].num_computed = 32
    (_, first), (_, second) = both.step({0: 50, 1: 18})
    assert torch.equal(first, expected) and torch.equal(second, expected[32:])


def test_a_resumed_sequence_gives_the_same_bits(runner: PagedModelRunner) -> None:
    """Preempted after 100 tokens of its decode, then recomputed in one chunk on other pages."""
    rng = random.Random(1)
    tokens = [rng.randrange(49152) for _ in range(120)]
    decoded, resumed = (PagedSequences(runner, [tokens], rng) for _ in range(2))
    decoded.step({0: 20})
    bits = torch.cat([decoded.step({0: 1})[0][1] for _ in range(100)])
    assert torch.equal(resumed.step({0: 120})[0][1][20:], bits)
