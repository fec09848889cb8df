"""The fitted step time: what it promises whatever is measured, and that it finds the right chunk."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.policy.step_time import FIRST_CHUNK_TOKENS, GROWTH, StepTimeModel, StepWork
from wire.ids import SeqId
from wire.plan import PrefillChunk, StepTiming

TARGET_US = 120_000.0
StepTime = Callable[[StepWork], float]


def affine(work: StepWork) -> float:
    """About SmolLM2-135M on two cores: 12 ms for the weights; a token takes 1 ms, twice that at 2,000 of context."""
    return 12_000 + 1_000 * work.tokens + 0.5 * work.chunk_pairs + 2.0 * work.decode_context


def larger_of_memory_and_compute(work: StepWork) -> float:
    """About a GPU: nothing more to pay until 100 tokens are computed while the weights are read."""
    return max(60_000 + 1.5 * work.decode_context, 600 * work.tokens + 0.1 * work.chunk_pairs)


def cheap_attention(work: StepWork) -> float:
    """About a model of billions of parameters: context hardly counts."""
    return 30_000 + 1_500 * work.tokens + 0.02 * work.chunk_pairs


def chunk_work(decodes: int, start: int, tokens: int, context: int = 200) -> StepWork:
    work = StepWork(decodes, decode_context=decodes * context)
    work.add_chunk(start, tokens)
    return work


class Prefill:
    """Long prompts beside decodes, chunk after chunk as large as the model allows."""

    def __init__(self, step_us: StepTime, *, decodes: int = 4, noise: float = 0.0, seed: int = 0) -> None:
        self.model = StepTimeModel()
        self.step_us = step_us
        self._decodes = decodes
        self._noise = noise
        self._rng = random.Random(seed)
        self._start = 0

    def step(self, slower: float = 1.0, budget: int = 4096, minimum: int = 16) -> tuple[int, float]:
        """One step; its chunk and the time it takes without noise."""
        if self._start >= 4000:
            self._start = 0
        decoding = StepWork(self._decodes, decode_context=200 * self._decodes)
        fits = self.model.chunk_that_fits(decoding, self._start, TARGET_US)
        tokens = min(max(fits, minimum), budget)
        work = chunk_work(self._decodes, self._start, tokens)
        exact_us = self.step_us(work)
        self.model.learn(work, exact_us * slower * self._rng.uniform(1 - self._noise, 1 + self._noise))
        self._start += tokens
        return tokens, exact_us

    def run(self, steps: int, slower: float = 1.0) -> list[tuple[int, float]]:
        return [self.step(slower) for _ in range(steps)]


@pytest.mark.parametrize("step_us", [affine, larger_of_memory_and_compute, cheap_attention])
@pytest.mark.parametrize("noise", [0.0, 0.15])
def test_steps_come_near_the_target_and_stay_there(step_us: StepTime, noise: float) -> None:
    prefill = Prefill(step_us, noise=noise)
    prefill.run(40)
    for tokens, exact_us in prefill.run(160):
        assert exact_us <= 1.25 * TARGET_US or tokens == 16
        assert exact_us >= 0.7 * TARGET_US, "a chunk is as large as the target allows"


def test_a_chunk_shrinks_as_its_context_grows() -> None:
    prefill = Prefill(affine)
    prefill.run(120)
    decoding = StepWork(4, decode_context=800)
    chunks = [prefill.model.chunk_that_fits(decoding, start, TARGET_US) for start in (0, 1000, 2000, 4000)]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[3] < 0.5 * chunks[0]


def test_before_anything_is_measured_the_chunk_is_small() -> None:
    assert StepTimeModel().chunk_that_fits(StepWork(4), 0, TARGET_US) == FIRST_CHUNK_TOKENS


def test_decodes_alone_say_little_of_chunks_so_the_first_one_is_small() -> None:
    model = StepTimeModel()
    for _ in range(50):
        model.learn(StepWork(4, decode_context=800), affine(StepWork(4, decode_context=800)))
    first = model.chunk_that_fits(StepWork(4, decode_context=800), 0, TARGET_US)
    assert affine(chunk_work(4, 0, first)) <= TARGET_US


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_one_hiccup_neither_collapses_nor_explodes_the_chunk(factor: float) -> None:
    prefill = Prefill(affine)
    prefill.run(60)
    decoding = StepWork(4, decode_context=800)
    before = prefill.model.chunk_that_fits(decoding, 1000, TARGET_US)
    prefill.step(slower=factor)
    after = prefill.model.chunk_that_fits(decoding, 1000, TARGET_US)
    assert 0.85 * before <= after <= 1.15 * before


def test_a_hiccup_in_the_very_first_step_is_forgotten() -> None:
    prefill = Prefill(affine)
    prefill.step(slower=10.0)
    prefill.run(40)
    assert prefill.step()[1] >= 0.7 * TARGET_US


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_machine_that_became_slower_or_faster_is_followed(factor: float) -> None:
    prefill = Prefill(affine)
    prefill.run(60)
    prefill.run(60, slower=factor)
    for tokens, exact_us in prefill.run(30, slower=factor):
        assert tokens == 16 or 0.7 * TARGET_US <= factor * exact_us <= 1.25 * TARGET_US


def test_an_hour_of_decodes_does_not_erase_what_chunks_cost() -> None:
    prefill = Prefill(affine)
    prefill.run(60)
    decoding = StepWork(4, decode_context=800)
    before = prefill.model.chunk_that_fits(decoding, 1000, TARGET_US)
    rng = random.Random(0)
    for number in range(5_000):
        alone = StepWork(4, decode_context=4 * (200 + number % 400))
        prefill.model.learn(alone, affine(alone) * rng.uniform(0.85, 1.15))
    prefill.step(slower=10.0)
    after = prefill.model.chunk_that_fits(decoding, 1000, TARGET_US)
    assert 0.85 * before <= after <= 1.15 * before, "a hiccup is still measured against the chunks of an hour ago"


def test_a_context_longer_than_any_measured_is_expected_to_cost() -> None:
    model = StepTimeModel()
    rng = random.Random(0)
    for _ in range(100):
        work = chunk_work(4, 0, rng.randint(16, 100))
        model.learn(work, affine(work) * rng.uniform(0.85, 1.15))
    chunk = model.chunk_that_fits(StepWork(4, decode_context=800), 4000, TARGET_US)
    assert affine(chunk_work(4, 4000, chunk)) <= 1.3 * TARGET_US


def test_a_step_that_did_not_run_its_chunks_teaches_nothing() -> None:
    model = StepTimeModel()
    chunk = PrefillChunk(SeqId(1), 1, 0, 64)
    model.observe([chunk], StepTiming(0, 0, 1000, 0, prefill_tokens=0, decode_tokens=4, context_tokens=800))
    assert model.predict_us(StepWork(4)) == 0.0
    model.observe([chunk], StepTiming(0, 0, 1000, 0, prefill_tokens=64, decode_tokens=4, context_tokens=864))
    assert model.predict_us(StepWork(4)) > 0.0
    assert model.decode_context == 800


works = st.builds(
    chunk_work, st.integers(0, 300), st.integers(0, 20_000), st.integers(1, 2048), context=st.integers(0, 2000)
)
times_us = st.floats(1.0, 1e8)


@given(
    steps=st.lists(st.tuples(works | st.builds(StepWork, st.integers(1, 300)), times_us), max_size=60),
    decodes=st.integers(0, 300),
    start=st.integers(0, 20_000),
    more=st.integers(1, 5000),
    target_us=st.floats(1.0, 1e6),
)
def test_whatever_is_measured_more_work_never_takes_less_and_a_chunk_fits_its_target(
    steps: list[tuple[StepWork, float]], decodes: int, start: int, more: int, target_us: float
) -> None:
    model = StepTimeModel()
    for work, step_us in steps:
        model.learn(work, step_us)
    decoding = StepWork(decodes, decode_context=100 * decodes)
    chunk = model.chunk_that_fits(decoding, start, target_us)
    assert 0 <= chunk <= max(FIRST_CHUNK_TOKENS, GROWTH * max((work.chunk_tokens for work, _ in steps), default=0))
    if chunk:
        assert model.predict_us(chunk_work(decodes, start, chunk, context=100)) <= target_us * (1 + 1e-9)
    assert model.chunk_that_fits(decoding, start + more, target_us) <= chunk
    assert model.chunk_that_fits(StepWork(decodes + more, decode_context=100 * decodes), start, target_us) <= chunk
    smaller = model.predict_us(chunk_work(decodes, start, 10))
    assert 0 <= smaller <= model.predict_us(chunk_work(decodes + more, start + more, 10 + more))


def test_a_step_without_work_or_time_teaches_nothing() -> None:
    model = StepTimeModel()
    model.observe([], StepTiming(0, 0, 1000, 0, prefill_tokens=0, decode_tokens=0, context_tokens=0))
    model.observe([], StepTiming(0, 0, 0, 0, prefill_tokens=0, decode_tokens=4, context_tokens=800))
    assert model.predict_us(StepWork(4)) == 0.0
