"""The step budget, the ITL target and turns, on workers whose steps take as long as they say (no time passes)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from scheduler.events import CancelRequested
from scheduler.policy.step_time import StepWork
from tests.engine.driver import Driver, make_request
from tests.engine.paged_worker import PagedWorker, expected_output
from wire.config import BatchingConfig
from wire.ids import RequestId

MIN_CHUNK = 8
TARGET_MS = 60.0
PROMPT_TOKENS = 380


def prompt(length: int, salt: int = 0) -> list[int]:
    return [2 + (i * 7 + salt * 13) % 40 for i in range(length)]


def slow(work: StepWork) -> float:
    """A short prompt stands for a long one: attention costs as much as it does at thousands of tokens."""
    return 8_000 + 800 * work.tokens + 3.0 * work.chunk_pairs + 20.0 * work.decode_context


def too_slow(work: StepWork) -> float:
    """One decode already takes longer than the target."""
    return 100_000 + 8_000 * work.tokens


def with_streams(streams: int, max_tokens: int, **config: Any) -> Driver:
    """So many sequences that decode."""
    driver = Driver(pages=600, itl_target_ms=TARGET_MS, min_chunk_tokens=MIN_CHUNK, **config)
    for number in range(streams):
        driver.arrive(f"stream{number}", prompt(4, number), max_tokens)
    while len(driver.outputs) < streams:
        driver.step()
    return driver


def prefill_all(driver: Driver, name: str, salt: int) -> list[tuple[StepWork, float]]:
    """Every step from a long prompt's arrival to its first token."""
    before = len(driver.worker.steps)
    driver.arrive(name, prompt(PROMPT_TOKENS, salt), 2)
    while f"{name}/0" not in driver.outputs:
        driver.step()
    return driver.worker.steps[before:]


@pytest.mark.parametrize("budget", [64, 400])
def test_steps_beside_a_long_prompt_keep_to_the_target(budget: int) -> None:
    driver = with_streams(4, 350, step_token_budget=budget, step_us=slow)
    for salt in range(3):  # to learn
        prefill_all(driver, f"learn{salt}", salt)
    steps = prefill_all(driver, "long", 9)
    chunks = [work for work, _ in steps if work.chunk_tokens]
    assert max(step_us for _, step_us in steps) <= 1.2 * 1000 * TARGET_MS
    assert sum(step_us for work, step_us in steps if work.chunk_tokens) >= 0.75 * 1000 * TARGET_MS * (len(chunks) - 1)
    assert chunks[0].chunk_tokens > 1.3 * chunks[-2].chunk_tokens, "the chunk shrinks as its context grows"


def test_a_step_without_decodes_may_take_twice_the_target_and_no_longer_once_one_decodes() -> None:
    driver = Driver(pages=600, itl_target_ms=TARGET_MS, min_chunk_tokens=MIN_CHUNK, step_token_budget=400, step_us=slow)
    for salt in range(3):  # to learn
        prefill_all(driver, f"learn{salt}", salt)
        driver.run()
    alone = [step_us for work, step_us in prefill_all(driver, "alone", 9) if work.chunk_tokens]
    driver.run()
    assert max(alone) <= 1.2 * 2000 * TARGET_MS
    assert min(alone[:-1]) >= 0.75 * 2000 * TARGET_MS
    driver.arrive("stream", prompt(4), 350)
    while "stream/0" not in driver.outputs:
        driver.step()
    beside = [step_us for work, step_us in prefill_all(driver, "beside", 10) if work.chunk_tokens]
    assert max(beside) <= 1.2 * 1000 * TARGET_MS


def test_without_a_target_every_step_uses_the_whole_budget() -> None:
    driver = Driver(pages=600, step_token_budget=64)
    driver.arrive("long", prompt(PROMPT_TOKENS), 2)
    driver.run()
    assert [work.chunk_tokens for work, _ in driver.worker.steps][:5] == [64] * 5


def test_a_target_that_cannot_be_kept_still_leaves_one_minimum_chunk_and_every_decode() -> None:
    driver = with_streams(6, 300, step_token_budget=64, step_us=too_slow)
    for work, _ in prefill_all(driver, "long", 3):
        assert work.tokens - work.chunk_tokens == 6, "every decode in every step"
        assert work.chunk_tokens in (0, MIN_CHUNK, PROMPT_TOKENS % MIN_CHUNK)


def test_a_hiccup_of_ten_times_does_not_stop_a_prefill() -> None:
    hiccups = iter([1.0] * 30 + [10.0] + [1.0] * 10_000)
    driver = with_streams(2, 350, step_token_budget=400, step_us=lambda work: slow(work) * next(hiccups))
    prefill_all(driver, "first", 1)
    steps = prefill_all(driver, "second", 2)
    assert max(step_us for _, step_us in steps[2:]) <= 1.3 * 1000 * TARGET_MS
    *chunks, _ = [work.chunk_tokens for work, _ in steps if work.chunk_tokens]  # the last one is what is left
    assert min(chunks) > MIN_CHUNK


def test_a_cancelled_prefill_is_let_go_within_the_running_and_the_queued_step() -> None:
    driver = with_streams(4, 350, step_token_budget=400, step_us=slow)
    prefill_all(driver, "learn", 1)
    driver.arrive("long", prompt(PROMPT_TOKENS, 2), 2)
    for _ in range(3):
        driver.step()
    before = len(driver.worker.steps)
    driver.feed(CancelRequested(RequestId("long"), "disconnect"))
    while any(plan.releases for plan in driver.worker.plans):
        driver.worker.run_step()
    steps = driver.worker.steps[before:]
    assert len(steps) <= 2 and any(work.chunk_tokens for work, _ in steps), "it was in mid-prefill"
    assert sum(step_us for work, step_us in steps) <= 2 * 1.2 * 1000 * TARGET_MS


def test_each_worker_has_its_own_fit() -> None:
    driver = Driver(workers=2, pages=600, itl_target_ms=TARGET_MS, step_token_budget=400, min_chunk_tokens=MIN_CHUNK)
    fast, slower = driver.workers.values()
    slower.step_us = slow
    fast.step_us = lambda work: 0.3 * slow(work)
    for salt in range(12):
        driver.arrive(f"p{salt}", prompt(PROMPT_TOKENS, salt), 2)
    driver.run()

    def largest(worker: PagedWorker) -> int:
        return max(work.chunk_tokens for work, _ in worker.steps)

    assert largest(fast) > 1.5 * largest(slower)


def test_decodes_above_the_budget_take_turns_least_recently_stepped_first() -> None:
    budget, running = 16, 40
    driver = Driver(pages=600, step_token_budget=budget, min_chunk_tokens=4, max_running=running)
    for number in range(running):
        driver.arrive(f"r{number}", prompt(4, number), 100)
    while len(driver.outputs) < running:
        driver.step()
    start = Counter({name: len(tokens) for name, tokens in driver.outputs.items()})
    for step in range(1, 26):
        driver.step()
        gained = [len(driver.outputs[name]) - start[name] for name in start]
        assert sum(gained) == step * budget, "every step is full"
        assert max(gained) - min(gained) <= 1, "nobody is ahead by more than a turn"
    driver.run()
    for number in range(running):
        expected = expected_output(prompt(4, number), make_request("x", [2], 100).sampling)
        assert driver.outputs[f"r{number}/0"] == expected


def test_prefill_goes_on_beside_decodes_that_take_turns() -> None:
    driver = Driver(pages=400, step_token_budget=16, min_chunk_tokens=4, max_running=41)
    for number in range(40):
        driver.arrive(f"r{number}", prompt(4, number), 30)
    while len(driver.outputs) < 40:
        driver.step()
    before = len(driver.worker.steps)
    driver.arrive("late", prompt(40, 99), 2)
    for _ in range(14):
        driver.step()
    assert "late/0" in driver.outputs
    chunks = [work.chunk_tokens for work, _ in driver.worker.steps[before:] if work.chunk_tokens]
    assert chunks == [4] * 10


def test_unless_told_otherwise_as_many_run_as_half_the_budget_holds() -> None:
    driver = Driver(pages=400, step_token_budget=16, min_chunk_tokens=4)
    for number in range(40):
        driver.arrive(f"r{number}", prompt(4, number), 30)
    assert BatchingConfig().max_running is None
    while len(driver.finished) < 40:
        driver.step()
        assert driver.engine.stats().running <= 8


def test_a_prompt_that_asks_for_one_token_is_no_decode() -> None:
    driver = Driver(pages=600, itl_target_ms=TARGET_MS, min_chunk_tokens=MIN_CHUNK, step_token_budget=400, step_us=slow)
    for salt in range(4):  # to learn
        driver.arrive(f"learn{salt}", prompt(PROMPT_TOKENS, salt), 2)
        driver.run()
    before = len(driver.worker.steps)
    for salt in range(4, 8):
        driver.arrive(f"one{salt}", prompt(PROMPT_TOKENS, salt), 1)
    driver.run()
    steps = driver.worker.steps[before:]
    assert all(work.tokens == work.chunk_tokens for work, _ in steps)
    assert min(step_us for _, step_us in steps[:-1]) >= 0.75 * 2000 * TARGET_MS, "no step is cut for decodes' sake"
