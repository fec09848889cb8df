from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from gpu_worker.randomness import uniform
from gpu_worker.sampler import filtered, sample
from gpu_worker.sequences import LiveSequence
from tests.worker.fake_runner import CARD, EOS
from tests.worker.plans import greedy, live
from wire.sampling import SamplingParams

VOCAB = 40
PROMPT = [3, 3, 5]
OUTPUT = [7, 7, 9]
NUM_DRAWS = 2500


def random_logits(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def drawn(logits: torch.Tensor, sequences: list[LiveSequence]) -> list[int]:
    tokens = [sampled.token for sampled in sample(logits, sequences, CARD)]
    assert all(token is not None for token in tokens)
    return [token for token in tokens if token is not None]


def reference_probs(logits: NDArray[np.float64], p: SamplingParams) -> NDArray[np.float64]:
    """The distribution of the next token after PROMPT + OUTPUT, written a second time, by definition."""
    x = logits.copy()
    for token, bias in p.logit_bias:
        x[token] += bias
    if len(OUTPUT) < p.min_tokens:
        x[[EOS, *(token for token in p.stop_token_ids if token < len(x))]] = -np.inf
    for token in set(PROMPT + OUTPUT):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token, count in Counter(OUTPUT).items():
        x[token] -= p.presence_penalty + p.frequency_penalty * count
    probs = np.exp((x - x.max()) / p.temperature)
    likeliest = sorted(range(len(x)), key=lambda token: (-probs[token], token))
    kept = likeliest[: p.top_k] if p.top_k else likeliest
    mass, nucleus = 0.0, []
    for token in kept:
        if mass >= p.top_p * probs[kept].sum():
            break
        nucleus.append(token)
        mass += probs[token]
    kept = [token for token in nucleus if probs[token] >= p.min_p * probs[nucleus[0]]]
    result = np.zeros(len(x))
    result[kept] = probs[kept] / probs[kept].sum()
    return result


CASES = {
    "plain": SamplingParams(100),
    "cold": SamplingParams(100, temperature=0.6),
    "hot": SamplingParams(100, temperature=1.7),
    "top_k": SamplingParams(100, top_k=6),
    "top_k beyond the vocabulary": SamplingParams(100, top_k=1000),
    "top_p": SamplingParams(100, top_p=0.7),
    "top_p of one token": SamplingParams(100, top_p=0.01),
    "min_p": SamplingParams(100, min_p=0.15),
    "repetition_penalty": SamplingParams(100, repetition_penalty=1.8),
    "repetition reward": SamplingParams(100, repetition_penalty=0.6),
    "presence_penalty": SamplingParams(100, presence_penalty=1.5),
    "frequency reward": SamplingParams(100, frequency_penalty=-0.9),
    "logit_bias": SamplingParams(100, logit_bias=((4, 5.0), (20, -100.0))),
    "min_tokens": SamplingParams(100, min_tokens=4, stop_token_ids=(8, 30_000)),
    "all": SamplingParams(
        100,
        temperature=0.8,
        top_k=12,
        top_p=0.9,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((4, 3.0),),
    ),
}


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
def test_draws_follow_the_reference_distribution(params: SamplingParams) -> None:
    row = random_logits(11, VOCAB)
    row[[EOS, 3, 7, 9]] = torch.tensor([1.5, 2.0, -0.5, 2.5])  # of either sign: the penalties' targets
    probs = reference_probs(row.double().numpy(), params)
    sequences = [live(PROMPT + OUTPUT, len(PROMPT), sampling=replace(params, seed=seed)) for seed in range(NUM_DRAWS)]
    counts = np.bincount(drawn(row.expand(NUM_DRAWS, -1), sequences), minlength=VOCAB)
    assert counts[probs == 0].sum() == 0
    if (probs > 0).sum() == 1:
        return
    # The chi-square approximation wants ≥ 5 expected draws a bin: the rarest tokens share one.
    rare = probs * NUM_DRAWS < 5
    observed = [*counts[~rare], counts[rare].sum()]
    expected = [*(probs[~rare] * NUM_DRAWS), probs[rare].sum() * NUM_DRAWS]
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert stats.chisquare(observed, expected).pvalue > 1e-3


def test_a_row_is_drawn_bitwise_the_same_alone_and_among_others() -> None:
    logits = random_logits(5, 64, 2000)
    kinds = [
        SamplingParams(9),
        SamplingParams(9, temperature=0.7, top_p=0.9),
        SamplingParams(9, top_k=50, min_p=0.01),
        SamplingParams(9, temperature=0.0, logprobs=3),
        SamplingParams(9, presence_penalty=1.0, logprobs=2),
    ]
    sequences = [live([1, 2, 3, i], 2, sampling=replace(kinds[i % 5], seed=i)) for i in range(64)]
    together = sample(logits, sequences, CARD)
    assert together == [sample(logits[i : i + 1], sequences[i : i + 1], CARD)[0] for i in range(64)]
    assert together[::-1] == sample(logits.flip(0), sequences[::-1], CARD)


def test_a_draw_depends_on_seed_choice_and_output_position_only() -> None:
    logits = random_logits(6, 1, 5000)
    params = SamplingParams(100, seed=77)
    first = drawn(logits, [live([1, 2], 1, sampling=params)])
    assert drawn(logits, [live([8, 8, 8, 8, 8], 4, sampling=params)]) == first
    assert drawn(logits, [live([1, 2], 1, sampling=replace(params, seed=78))]) != first
    assert drawn(logits, [live([1, 2], 1, sampling=params, choice=1)]) != first
    assert drawn(logits, [live([1, 2, 3], 1, sampling=params)]) != first


def test_the_draw_inverts_the_distribution_in_token_id_order() -> None:
    params = SamplingParams(100, seed=123)
    u = uniform(123, 0, 0)
    row = random_logits(9, 1000)
    cdf = np.cumsum(reference_probs(row.double().numpy(), replace(params, repetition_penalty=1.0)))
    assert drawn(row[None], [live([1], sampling=params)]) == [int(np.searchsorted(cdf, u, side="right"))]


def test_greedy_ties_go_to_the_lowest_token_id() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [30, 12, 21]] = 4.0
    assert drawn(row, [live([1])]) == [12]
    assert drawn(row, [live([1], sampling=greedy(presence_penalty=1.0))]) == [12]
    assert drawn(row, [live([1, 12], 1, sampling=greedy(presence_penalty=1.0))]) == [21]


def test_filters_cut_ties_at_the_boundary_to_the_lowest_ids() -> None:
    scaled = torch.zeros(10, dtype=torch.float64)
    assert filtered(scaled, SamplingParams(1, top_k=3))[0].tolist() == [0, 1, 2]
    assert filtered(scaled, SamplingParams(1, top_p=0.45))[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("top_p", [0.02, 0.3, 0.99])
def test_top_p_is_exact_however_many_tokens_it_takes(top_p: float) -> None:
    row = random_logits(13, 10_000) * 0.1  # flat: the nucleus is most of the vocabulary
    ids, _ = filtered((row - row.max()).double(), SamplingParams(1, top_p=top_p))
    probs = row.double().softmax(0)
    assert float(probs[ids].sum()) >= top_p
    assert float(probs[ids].sum() - probs[ids].min()) < top_p


def test_min_tokens_holds_back_eos_and_stop_ids_then_lets_them_go() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [EOS, 8, 5]] = torch.tensor([9.0, 8.0, 7.0])
    params = greedy(min_tokens=2, stop_token_ids=(8,))
    assert drawn(row, [live([1, 2], 1, sampling=params)]) == [5]
    assert drawn(row, [live([1, 2, 2], 1, sampling=params)]) == [EOS]
    assert drawn(row, [live([1], sampling=replace(params, ignore_eos=True))]) == [EOS]


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    row = random_logits(3, 1, VOCAB)
    token = drawn(row, [live([1], sampling=SamplingParams(1, temperature=temperature))])[0]
    if temperature < 1:
        assert token == int(row.argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_logits_end_one_row_and_leave_the_others(bad: float, temperature: float) -> None:
    logits = random_logits(4, 3, VOCAB)
    params = SamplingParams(9, temperature=temperature)
    sequences = [live([i], sampling=params) for i in range(3)]
    sound = sample(logits, sequences, CARD)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 17] = bad
    assert [s.token for s in sample(logits, sequences, CARD)] == [sound[0].token, None, sound[2].token]


def test_logprobs_are_of_the_raw_logits() -> None:
    row = random_logits(8, VOCAB)
    params = SamplingParams(9, temperature=0.3, top_k=2, logit_bias=((6, 100.0),), logprobs=3)
    sampled = sample(row[None], [live([1], sampling=params)], CARD)[0]
    expected = row.double().log_softmax(0)
    assert sampled.token == 6
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(expected[6]))
    assert sampled.logprobs.top_ids == row.topk(3).indices.tolist()
    assert sampled.logprobs.top_logprobs == pytest.approx(expected.topk(3).values.tolist())


def test_logprobs_zero_gives_the_chosen_token_only_and_none_gives_none() -> None:
    row = random_logits(8, 1, VOCAB)
    zero = sample(row, [live([1], sampling=greedy(logprobs=0))], CARD)[0].logprobs
    assert zero is not None
    assert zero.top_ids == []
    assert sample(row, [live([1])], CARD)[0].logprobs is None


def test_an_empty_batch_gives_nothing() -> None:
    assert sample(torch.empty(0, VOCAB), [], CARD) == []
