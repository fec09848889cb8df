"""The batched sampler against the row-wise one."""

from __future__ import annotations

import math
import random

import pytest
import torch

from gpu_worker.cuda import device_sampler
from gpu_worker.cuda.device_sampler import DeviceSamples, SampleRow, sample_on_device
from gpu_worker.sampler import sample
from gpu_worker.sequences import LiveSequence
from tests.worker.fake_runner import CARD, EOS
from tests.worker.plans import greedy, live
from wire.sampling import SamplingParams

VOCAB = CARD.vocab_size


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def drawn(logits: torch.Tensor, sequences: list[LiveSequence]) -> DeviceSamples:
    return sample_on_device(logits, [SampleRow(s, s.num_output_tokens) for s in sequences], CARD)


def random_params(rng: random.Random) -> SamplingParams:
    """Any mixture, the neutral values among them."""
    return SamplingParams(
        100,
        min_tokens=rng.choice([0, 0, 0, 9]),
        temperature=rng.choice([0.0, 0.3, 1.0, 1.9]),
        top_k=rng.choice([0, 0, 1, 7, 50, 511, 512, 10_000]),
        top_p=rng.choice([1.0, 1.0, 0.9, 0.5, 0.01]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.5]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, -0.4]),
        logit_bias=rng.choice([(), (), ((4, 5.0), (20, -100.0))]),
        seed=rng.getrandbits(64),
        logprobs=rng.choice([None, None, 0, 3]),
    )


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rows_at_once", [64, 3])
@pytest.mark.parametrize("ranked_tokens", [1024, 20])
def test_every_mixture_of_rows_gives_the_row_wise_samplers_tokens(
    seed: int, rows_at_once: int, ranked_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_sampler, "ROWS_AT_ONCE", rows_at_once)
    monkeypatch.setattr(device_sampler, "_RANKED_TOKENS", ranked_tokens)
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(2, 12))] for _ in range(40)]
    sequences = [live(p, rng.randint(1, len(p)), sampling=random_params(rng), choice=rng.randrange(4)) for p in prompts]
    logits = random_logits(seed, len(sequences), VOCAB)
    logits[::7] = logits[::7].round()  # ties at every boundary
    before = logits.clone()
    actual = drawn(logits, sequences)
    assert torch.equal(logits, before)
    expected = sample(logits, sequences, CARD)
    assert bool(actual.sound.all())
    assert actual.tokens.tolist() == [s.token for s in expected]
    assert actual.logprob_rows == [i for i, s in enumerate(expected) if s.logprobs is not None]
    assert actual.logprobs is not None
    most = (actual.logprobs.shape[1] - 1) // 2
    for row, values in zip(actual.logprob_rows, actual.logprobs.tolist(), strict=True):
        wanted = expected[row].logprobs
        assert wanted is not None
        count = len(wanted.top_ids)
        assert values[0] == pytest.approx(wanted.logprob)
        assert values[1 : 1 + count] == wanted.top_ids
        assert values[1 + most : 1 + most + count] == pytest.approx(wanted.top_logprobs)


def test_greedy_ties_go_to_the_lowest_token_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, [30, 12, 21]] = 4.0
    sequences = [live([1]), live([1, 12], 1, sampling=greedy(presence_penalty=1.0))]
    assert drawn(logits, sequences).tokens.tolist() == [12, 21]


def test_a_draw_is_of_the_position_it_is_given_not_of_what_the_host_has_read() -> None:
    logits = random_logits(3, 1, VOCAB)
    ahead = live([1, 2, 3], 1, sampling=SamplingParams(9, seed=7))
    known = live([1, 2, 3, 4], 1, sampling=SamplingParams(9, seed=7))
    tokens = sample_on_device(logits, [SampleRow(ahead, 3)], CARD).tokens
    assert tokens.tolist() == [sample(logits, [known], CARD)[0].token]
    held_back = live([1, 2], 1, sampling=greedy(min_tokens=2))
    logits[0, EOS] = 100.0
    for position, token in ((1, int(logits[0, 1:].argmax()) + 1), (2, EOS)):
        assert sample_on_device(logits, [SampleRow(held_back, position)], CARD).tokens.tolist() == [token]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_mark_one_row_and_leave_the_others(bad: float, temperature: float) -> None:
    logits = random_logits(4, 3, VOCAB)
    sequences = [live([i], sampling=SamplingParams(9, temperature=temperature)) for i in range(3)]
    expected = drawn(logits, sequences).tokens.tolist()
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 17] = bad
    actual = drawn(logits, sequences)
    assert actual.sound.tolist() == [True, False, True]
    assert actual.tokens[[0, 2]].tolist() == [expected[0], expected[2]]


def test_a_row_whose_every_token_is_held_back_is_unusable() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, EOS] = 1.0
    assert drawn(logits, [live([1], sampling=greedy(min_tokens=5))]).sound.tolist() == [False]
