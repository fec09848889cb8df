from __future__ import annotations

import random
from itertools import product

import pytest
from scipy import stats

from gpu_worker.randomness import philox4x32, uniform, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_the_known_answers_of_random123(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, int, int, int]
) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_is_fixed_for_all_time() -> None:
    """A changed draw would change every seeded request's output."""
    golden = {
        (0, 0, 0): 0.39904647231489565,
        (42, 0, 0): 0.6129598801477738,
        (42, 1, 0): 0.2612414769172763,
        (42, 0, 1): 0.9877186516453577,
        (2**64 - 1, 3, 1000): 0.3185190540298136,
    }
    assert {arguments: uniform(*arguments) for arguments in golden} == golden


def test_uniform_is_uniform_over_each_of_its_arguments() -> None:
    for draws in (
        [uniform(7, 0, position) for position in range(5000)],
        [uniform(seed, 0, 0) for seed in range(5000)],
        [uniform(7, choice, 0) for choice in range(5000)],
    ):
        assert all(0 <= u < 1 for u in draws)
        assert stats.kstest(draws, "uniform").pvalue > 1e-3


def test_no_two_neighbours_share_a_draw() -> None:
    draws = {uniform(*arguments) for arguments in product(range(20), range(20), range(20))}
    assert len(draws) == 8000


@pytest.mark.parametrize("count", [0, 1, 24, 25, 300])
def test_many_draws_are_those_of_one_by_one(count: int) -> None:
    rng = random.Random(count)
    seeds = [rng.choice((0, 2**64 - 1, rng.getrandbits(64))) for _ in range(count)]
    choices = [rng.randrange(128) for _ in range(count)]
    positions = [rng.randrange(2**31) for _ in range(count)]
    one_by_one = [uniform(*arguments) for arguments in zip(seeds, choices, positions, strict=True)]
    assert uniforms(seeds, choices, positions) == one_by_one
