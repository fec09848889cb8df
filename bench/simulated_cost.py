"""What a step of the simulated workers of bench.routing, bench.disaggregation and bench.churn costs."""

from __future__ import annotations

from gpu_worker.step_cost import PullCost, StepCost

COST = StepCost(fixed_us=2000, weights_us=10_000, context_token_us=0.05, prefill_token_us=100, decode_token_us=150)
"""About a model of 7 billion parameters on one mid-size GPU: 12 ms a decode step, 10,000 prefill tokens/s."""
PULL_COST = PullCost(fixed_us=2000, unit_us=200)
"""A unit of a model of 7 billion parameters, 2 MB with grouped heads, at 10 GB/s: a good network between hosts."""
STEP_TOKEN_BUDGET = 512
PAGE_SIZE = 64


def simulated_variables(cost: StepCost, pull: PullCost) -> dict[str, str]:
    """The same as variables of `phasemesh up --simulate`, named without PHASEMESH_."""
    return {
        "SIMULATED_FIXED_US": str(cost.fixed_us),
        "SIMULATED_WEIGHTS_US": str(cost.weights_us),
        "SIMULATED_CONTEXT_TOKEN_US": str(cost.context_token_us),
        "SIMULATED_PREFILL_TOKEN_US": str(cost.prefill_token_us),
        "SIMULATED_DECODE_TOKEN_US": str(cost.decode_token_us),
        "SIMULATED_PULL_FIXED_US": str(pull.fixed_us),
        "SIMULATED_PULL_UNIT_US": str(pull.unit_us),
    }
