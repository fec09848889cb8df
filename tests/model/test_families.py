"""Every family's logits equal transformers' at every position, however the tokens are split, batched and paged."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.model.checkpoints import FAMILIES, make_checkpoint
from tests.model.conftest import Reference, load_reference
from tests.model.paged import PagedSequences, open_runner

LENGTHS = (1, 7, 33, 64, 150)  # beyond every sliding window and every original context of the scaled ropes


def token_lists(rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(320) for _ in range(length)] for length in LENGTHS]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)


def whole(remaining: dict[int, int]) -> dict[int, int]:
    """One sequence a step, all of it."""
    index = next(iter(remaining))
    return {index: remaining[index]}


def one_token_each(remaining: dict[int, int]) -> dict[int, int]:
    return dict.fromkeys(remaining, 1)


def random_mix(rng: random.Random) -> Callable[[dict[int, int]], dict[int, int]]:
    """Some sequences, in any order; each a decode of one token or a chunk of any size."""

    def choose(remaining: dict[int, int]) -> dict[int, int]:
        members = rng.sample(sorted(remaining), rng.randint(1, len(remaining)))
        return {i: 1 if rng.random() < 0.4 else rng.randint(1, min(remaining[i], 40)) for i in members}

    return choose


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers_at_every_position(
    family: str, page_size: int, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    rng = random.Random(f"{family} {page_size}")
    runner = open_runner(checkpoint(family), page_size=page_size)
    prompts = token_lists(rng)
    expected = [reference(family)(prompt) for prompt in prompts]
    for choose in (whole, one_token_each, random_mix(rng), random_mix(rng)):
        for actual, wanted in zip(PagedSequences(runner, prompts, rng).run(choose), expected, strict=True):
            assert_close(actual, wanted)


@pytest.mark.parametrize("family", ["llama3_rope", "mistral_window", "qwen2"])
def test_bfloat16_checkpoint_is_computed_in_float32_on_a_cpu(family: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, family, dtype=torch.bfloat16)
    runner = open_runner(directory)
    assert runner.card.kv_dtype == "float32"
    prompt = token_lists(random.Random(0))[2]
    [actual] = PagedSequences(runner, [prompt], random.Random(1)).run(whole)
    assert_close(actual, load_reference(directory)(prompt))


def test_more_decodes_than_one_group_holds(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    rng = random.Random(3)
    runner = open_runner(checkpoint("llama_gqa_tied"), num_pages=1200)
    prompts = [[rng.randrange(320) for _ in range(257 + i % 9)] for i in range(40)]
    sequences = PagedSequences(runner, prompts, rng)
    for index, prompt in enumerate(prompts):
        sequences.step({index: len(prompt) - 1})
    for index, logits in sequences.step(dict.fromkeys(range(40), 1)):
        assert_close(logits[-1], reference("llama_gqa_tied")(prompts[index])[-1])


@pytest.mark.parametrize("length", [5, 130])
def test_real_model_equals_transformers(length: int, smollm2_dir: Path) -> None:
    rng = random.Random(length)
    runner = open_runner(smollm2_dir)
    prompts = [[rng.randrange(49152) for _ in range(length)], [rng.randrange(49152) for _ in range(length // 2)]]
    reference = load_reference(smollm2_dir)
    for actual, prompt in zip(PagedSequences(runner, prompts, rng).run(random_mix(rng)), prompts, strict=True):
        torch.testing.assert_close(actual, reference(prompt), rtol=0, atol=1e-3)
