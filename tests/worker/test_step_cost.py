from __future__ import annotations

from gpu_worker.step_batch import StepBatch
from gpu_worker.step_cost import StepCost

COST = StepCost(fixed_us=10, weights_us=100, context_token_us=0.5, prefill_token_us=8, decode_token_us=4)


def test_a_step_takes_the_larger_of_memory_and_compute_plus_its_fixed_part() -> None:
    few = COST.step_us(prefill_tokens=0, decode_tokens=3, context_tokens=40)
    assert few == 10 + (100 + 20)  # compute, 12, hides behind it
    many = COST.step_us(prefill_tokens=64, decode_tokens=3, context_tokens=40)
    assert many == 10 + (64 * 8 + 3 * 4)


def test_a_cost_of_nothing_takes_no_time() -> None:
    assert StepCost().step_us(prefill_tokens=1000, decode_tokens=1000, context_tokens=10**6) == 0


def test_a_batch_is_told_apart_by_its_queries() -> None:
    batch = StepBatch(token_ids=[7] * 12, query_lens=[10, 1, 1], context_lens=[10, 300, 500])
    assert COST.batch_us(batch) == COST.step_us(prefill_tokens=10, decode_tokens=2, context_tokens=810)
