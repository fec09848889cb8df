"""The engine in virtual time: exact tokens, exact pages, the same run every time."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from bench.load import poisson_arrivals
from bench.measure import Result, Slo, figures
from bench.prefix_workloads import PrefixShape, shared_prefixes, unshared
from bench.prompts import PromptRequest, TokenIds
from bench.simulator import CARD, SimulatedRun, Simulation, WorkerShape, timed
from bench.virtual_worker import predicted_token
from gpu_worker.step_cost import PullCost, StepCost
from scheduler.engine import Engine
from wire.config import BatchingConfig
from wire.ids import Fence, WorkerId
from wire.plan import Role

COST = StepCost(fixed_us=2000, weights_us=8000, context_token_us=0.05, prefill_token_us=100, decode_token_us=200)
PULL = PullCost(fixed_us=1000, unit_us=200)
SHAPE = PrefixShape(prefixes=6, requests=240, prefix_tokens=320)
WORKER = WorkerShape(COST, num_pages=120, page_size=32)


def new_engine(**config: float) -> Engine:
    batching = BatchingConfig(**{"step_token_budget": 256, **config})  # type: ignore[arg-type]
    return Engine(batching, no_worker_grace_s=60.0, routing_seed=0, fence=Fence(1))


def shared_requests(rate: float = 40.0) -> list[PromptRequest]:
    return timed(shared_prefixes(SHAPE, 1), poisson_arrivals(rate, SHAPE.requests, 1))


def check(simulation: Simulation, run: SimulatedRun, requests: list[PromptRequest]) -> None:
    """Every request ended once, with the tokens predicted, and every page is back."""
    assert set(run.terminals) == {1}
    for index, request in enumerate(requests):
        expected = [predicted_token(index, position, CARD.vocab_size) for position in range(request.max_tokens)]
        assert run.tokens[index] == expected
    for worker in simulation.engine.stats().workers:
        assert (worker.pages.in_use, worker.pages.retiring, worker.running) == (0, 0, 0)


def test_every_request_ends_once_with_the_predicted_tokens_and_no_page_is_left() -> None:
    simulation, requests = Simulation(new_engine(), [WORKER] * 3), shared_requests()
    run = simulation.run(requests)
    check(simulation, run, requests)
    assert {outcome.result for outcome in run.outcomes} == {Result.OK}
    assert len(run.busy_s) == 3 and 0 < run.utilization <= 1


def test_a_run_depends_on_its_inputs_alone() -> None:
    first, again = (Simulation(new_engine(), [WORKER] * 3).run(shared_requests()) for _ in range(2))
    assert first == again
    other = Simulation(new_engine(), [WORKER] * 3, link_s=0.002).run(shared_requests())
    assert other.outcomes != first.outcomes


def test_a_lone_prompt_takes_its_steps_and_the_link() -> None:
    # Steps of the budget's 256 tokens, then of 44; the second plan waits at the worker. Then a decode a step.
    request = PromptRequest(TokenIds(tuple(range(1000, 1300))), 3, at_s=1.0)
    run = Simulation(new_engine(itl_target_ms=inf), [WORKER], link_s=0.001).run([request])
    outcome = run.outcomes[0]
    first_us, second_us = 2000 + 25_600, 2000 + 8000 + 300 * 0.05
    assert outcome.ttft_s == pytest.approx(1e-6 * (first_us + second_us) + 2 * 0.001, abs=1e-5)
    assert outcome.itls_s == pytest.approx([0.010, 0.010], abs=1e-4)


def test_shared_prefixes_are_computed_once_and_others_are_not() -> None:
    for requests, lowest, highest in ((shared_prefixes(SHAPE, 1), 0.7, 0.95), (unshared(SHAPE, 1), 0.0, 0.0)):
        run = Simulation(new_engine(), [WORKER] * 3).run(timed(requests, poisson_arrivals(20.0, SHAPE.requests, 1)))
        cached = sum(outcome.cached_tokens or 0 for outcome in run.outcomes)
        assert lowest <= cached / sum(outcome.prompt_tokens or 0 for outcome in run.outcomes) <= highest


@pytest.mark.parametrize(
    "roles", [[Role.BOTH] * 4, [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]], ids=["both", "split"]
)
def test_workers_that_leave_and_join_all_the_while_lose_no_token(roles: list[Role]) -> None:
    shapes = {WorkerId(f"worker-{n}"): replace(WORKER, role=role, pull=PULL) for n, role in enumerate(roles, 1)}
    simulation, requests = Simulation(new_engine(), list(shapes.values())), shared_requests()
    rng = random.Random(5)

    def churn() -> None:
        if len(simulation.workers) > 2:
            simulation.leave(rng.choice(sorted(simulation.workers)))
        else:
            gone = min(shapes.keys() - simulation.workers.keys())
            simulation.join(gone, shapes[gone])
        if simulation.now < 6.0:
            simulation.after(0.2, churn)

    simulation.after(0.5, churn)
    run = simulation.run(requests)
    check(simulation, run, requests)
    assert simulation.engine.stats().displaced > 20
    assert any(transfer.failure is None for transfer in run.transfers)


def test_a_prefix_is_pulled_from_the_worker_that_has_it_when_that_one_is_busy() -> None:
    shape = replace(SHAPE, prefixes=2, prefix_tokens=1600)
    requests = timed(shared_prefixes(shape, 1), poisson_arrivals(60.0, shape.requests, 1))
    p90_ms = {}
    for kv_pull in (True, False):
        simulation = Simulation(new_engine(kv_pull=kv_pull), [replace(WORKER, num_pages=400, pull=PULL)] * 4)
        run = simulation.run(requests)
        check(simulation, run, requests)
        assert bool(run.transfers) is kv_pull
        ttft_ms = figures(run.outcomes, run.duration_s, Slo()).ttft_ms
        assert ttft_ms is not None
        p90_ms[kv_pull] = ttft_ms.p90
    assert p90_ms[True] < p90_ms[False]


def test_a_run_that_never_ends_is_an_error_at_its_limit() -> None:
    simulation = Simulation(new_engine(), [WORKER])
    simulation.leave(WorkerId("worker-1"))
    with pytest.raises(AssertionError, match="1 requests have not ended after 5"):
        simulation.run([PromptRequest(TokenIds((1000, 1001)), 3, at_s=0.0)], limit_s=5.0)
