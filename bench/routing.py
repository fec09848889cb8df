"""Four ways to route, in one run: `python -m bench.routing [--virtual | --real]`.

| arm | a request goes |
|---|---|
| random | anywhere it fits |
| least_loaded | where least is queued |
| approximate | where its prefix was sent before, as far as the scheduler remembers what it sent |
| precise | where its prefix lies, by what workers report |

Every round asks all arms for the same requests in turn: many shared prefixes of 2,000 tokens; then, of least_loaded
and precise, prompts as long that share nothing. By default on 8 simulated workers behind a whole stack of processes;
--virtual runs the same engine without processes (bench/simulator.py): no CPU limits it; --real runs the model.
The bars are those of simulated workers: p90 TTFT of precise at least 3 × better than random's, and on the second
workload never more than 5 % worse than least_loaded's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from bench.live_load import Measured, run_load
from bench.load import poisson_arrivals
from bench.measure import Figures, Outcome, Percentiles, Result, Slo, figures
from bench.openai_stream import BenchFailed
from bench.prefix_workloads import PrefixShape, shared_prefixes, unshared
from bench.prompts import PromptRequest
from bench.simulated_cost import COST, PAGE_SIZE, PULL_COST, STEP_TOKEN_BUDGET, simulated_variables
from bench.simulator import Simulation, WorkerShape, new_engine, timed
from bench.stack import running_stack
from wire.config import BatchingConfig

TTFT_BAR = 3.0
UNSHARED_BAR = 1.05
DEFAULTS = (  # option, simulated, real: a model of 135M parameters on one core prefills some 450 tokens/s
    ("workers", 8, 2),
    ("prefixes", 48, 4),
    ("rate", 32.0, 0.8),
    ("output_tokens", 64, 16),
    ("itl_target_ms", 60.0, 120.0),
)


class Arm(StrEnum):
    RANDOM = "random"
    LEAST_LOADED = "least_loaded"
    APPROXIMATE = "approximate"
    PRECISE = "precise"


UNSHARED_ARMS = (Arm.LEAST_LOADED, Arm.PRECISE)


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured on."""

    workers: int
    pages: int
    """Of each worker."""
    kind: str
    """virtual | simulated | real."""
    itl_target_ms: float


@dataclass(slots=True)
class ArmResult:
    """All rounds of one arm."""

    outcomes: list[Outcome] = field(default_factory=list)
    duration_s: float = 0.0
    cpu_shares: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, measured: Measured) -> None:
        self.outcomes += measured.outcomes
        self.duration_s += measured.duration_s
        self.cpu_shares.append(measured.cpu_share)
        self.warnings += measured.warnings

    def figures(self) -> Figures:
        return figures(self.outcomes, self.duration_s, Slo())


def pages_for(shape: PrefixShape, workers: int, demand: float) -> int:
    """KV pages of each worker such that all prefixes want `demand` of the cell's KV."""
    return math.ceil(shape.shared_tokens / demand / workers / PAGE_SIZE)


def measure_once(cell: Cell, arm: Arm, requests: Sequence[PromptRequest], seed: int) -> Measured:
    """One arm, one round, on a cell of its own with empty caches."""
    if cell.kind == "virtual":
        config = BatchingConfig(
            step_token_budget=STEP_TOKEN_BUDGET, itl_target_ms=cell.itl_target_ms, routing=arm.value
        )
        shapes = [WorkerShape(COST, cell.pages, PAGE_SIZE, pull=PULL_COST)] * cell.workers
        run = Simulation(new_engine(config, seed=seed), shapes).run(requests)
        return Measured(run.outcomes, run.duration_s, 0.0, ())
    variables = {
        "ROUTING": arm.value,
        "ROUTING_SEED": str(seed),
        "KV_PAGES": str(cell.pages),
        "KV_PAGE_SIZE": str(PAGE_SIZE),
        "ITL_TARGET_MS": str(cell.itl_target_ms),
    }
    if cell.kind == "simulated":
        variables |= {"STEP_TOKEN_BUDGET": str(STEP_TOKEN_BUDGET), **simulated_variables(COST, PULL_COST)}
    options = ["--workers", str(cell.workers), "--simulate", "on" if cell.kind == "simulated" else "off"]
    with running_stack(options, variables) as stack:
        return run_load(stack, requests)


def compare(
    cell: Cell, arms: Sequence[Arm], workload: Sequence[Sequence[PromptRequest]], rate: float
) -> dict[Arm, ArmResult]:
    """Every arm on every round's requests; the arms' order turns from round to round, so that drift favours none."""
    results = {arm: ArmResult() for arm in arms}
    for number, requests in enumerate(workload):
        due = timed(requests, poisson_arrivals(rate, len(requests), seed=number))
        turn = number % len(arms)
        for arm in (*arms[turn:], *arms[:turn]):
            results[arm].add(measure_once(cell, arm, due, seed=number))
            print(f"  round {number + 1}, {arm.value}: {_brief(results[arm])}", flush=True)
    return results


def _brief(result: ArmResult) -> str:
    ok = sum(outcome.result is Result.OK for outcome in result.outcomes)
    return f"{ok} of {len(result.outcomes)} requests came through so far"


HEAD = (
    f"{'arm':<13} {'req/s':>6} {'tok/s':>7} {'TTFT p50':>9} {'p90':>8} {'p99 ms':>8} {'ITL p50':>8} {'p99 ms':>8} "
    f"{'hit':>6} {'refused':>7} {'failed':>6} {'CPU':>5} {'TTFT p90':>9}"
)


def table(results: dict[Arm, ArmResult], baseline: Arm) -> str:
    """A row for each arm; the last column is its p90 TTFT ÷ the baseline's."""
    lines = [f"{HEAD} ÷ {baseline.value}"]
    base = _ttft(results[baseline].figures()).p90
    for arm, result in results.items():
        f = result.figures()
        ttft, itl = _ttft(f), f.itl_ms
        refused = f.results[Result.REJECTED]
        failed = f.results[Result.ERROR] + f.results[Result.DROPPED]
        cpu = max(result.cpu_shares)
        lines.append(
            f"{arm.value:<13} {f.requests_per_s:6.1f} {f.output_tok_per_s:7.0f} {ttft.p50:9.1f} {ttft.p90:8.1f} "
            f"{ttft.p99:8.1f} {itl.p50 if itl else 0:8.1f} {itl.p99 if itl else 0:8.1f} {f.prefix_hit_share or 0:6.1%} "
            f"{refused:7} {failed:6} {cpu:5.0%} {ttft.p90 / base:9.2f}"
        )
    lines += [f"warning, {arm.value}: {text}" for arm, result in results.items() for text in result.warnings]
    return "\n".join(lines)


def _ttft(f: Figures) -> Percentiles:
    if f.ttft_ms is None:
        raise BenchFailed(f"no request came through: {f.reasons}")
    return f.ttft_ms


@dataclass(frozen=True, slots=True)
class Bar:
    words: str
    value: float
    kept: bool

    def __str__(self) -> str:
        return f"bar: {self.words}: {self.value:.2f}, {'kept' if self.kept else 'MISSED'}"


def bars(shared: dict[Arm, ArmResult], alone: dict[Arm, ArmResult]) -> list[Bar]:
    """The bars that simulated workers are held to; those whose arms were measured."""
    found = []
    if {Arm.RANDOM, Arm.PRECISE} <= shared.keys():
        gain = _ttft(shared[Arm.RANDOM].figures()).p90 / _ttft(shared[Arm.PRECISE].figures()).p90
        found.append(Bar(f"p90 TTFT of random ÷ precise, shared prefixes, ≥ {TTFT_BAR:g}", gain, gain >= TTFT_BAR))
    if set(UNSHARED_ARMS) <= alone.keys():
        ours, theirs = (alone[arm].figures() for arm in (Arm.PRECISE, Arm.LEAST_LOADED))
        for name, worse in (
            ("p50 TTFT", _ttft(ours).p50 / _ttft(theirs).p50),
            ("p90 TTFT", _ttft(ours).p90 / _ttft(theirs).p90),
            ("time per token served", theirs.output_tok_per_s / ours.output_tok_per_s),
        ):
            words = f"{name} of precise ÷ least_loaded, nothing shared, ≤ {UNSHARED_BAR:g}"
            found.append(Bar(words, worse, worse <= UNSHARED_BAR))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--virtual", action="store_true", help="the engine alone, in virtual time")
    kind.add_argument("--real", action="store_true", help="the model, not simulated workers")
    parser.add_argument("--arms", nargs="+", choices=list(Arm), default=list(Arm), help="default: all")
    parser.add_argument("--workers", type=int, help="default: 8; with --real 2")
    parser.add_argument("--prefixes", type=int, help="distinct ones; default: 48; with --real 4")
    parser.add_argument("--prefix-tokens", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--per-prefix", type=int, default=20, help="requests of each at least; default: %(default)s")
    parser.add_argument("--requests", type=int, help="in a round; default: --prefixes × --per-prefix")
    parser.add_argument("--zipf", type=float, default=0.0, help="exponent of the prefixes' popularity; default: even")
    parser.add_argument("--demand", type=float, default=0.75, help="KV of all prefixes ÷ KV of all workers")
    parser.add_argument("--rate", type=float, help="requests/s; default: 32; with --real 0.8")
    parser.add_argument("--output-tokens", type=int, help="at most, of a request; default: 64; with --real 16")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--itl-target-ms", type=float, help="default: 60; with --real 120")
    parser.add_argument("--shared-only", action="store_true", help="without the workload that shares nothing")
    asked = parser.parse_args()
    for name, simulated, real in DEFAULTS:
        if getattr(asked, name) is None:
            setattr(asked, name, real if asked.real else simulated)
    workers = asked.workers
    requests = asked.requests or asked.prefixes * asked.per_prefix
    try:
        shape = PrefixShape(
            asked.prefixes,
            requests,
            prefix_tokens=asked.prefix_tokens,
            output_tokens=(-(-asked.output_tokens // 2), asked.output_tokens),
            min_per_prefix=asked.per_prefix,
            zipf_exponent=asked.zipf,
        )
    except ValueError as error:
        parser.error(str(error))
    named = "virtual" if asked.virtual else "real" if asked.real else "simulated"
    cell = Cell(workers, pages_for(shape, workers, asked.demand), named, asked.itl_target_ms)
    print(
        f"{workers} {named} workers of {cell.pages} pages of {PAGE_SIZE} tokens; {asked.prefixes} prefixes of "
        f"{asked.prefix_tokens} tokens, {requests} requests a round at {asked.rate:g}/s, {asked.rounds} round(s)"
    )
    arms = [Arm(arm) for arm in asked.arms]
    try:
        shared = compare(cell, arms, [shared_prefixes(shape, n) for n in range(asked.rounds)], asked.rate)
        print(f"\nshared prefixes\n{table(shared, arms[0])}", flush=True)
        also = [] if asked.shared_only else [arm for arm in arms if arm in UNSHARED_ARMS]
        alone = compare(cell, also, [unshared(shape, n) for n in range(asked.rounds)], asked.rate) if also else {}
    except BenchFailed as error:
        raise SystemExit(f"bench.routing: {error.message}") from None
    if alone:
        print(f"\nnothing shared\n{table(alone, also[0])}")
    held = bars(shared, alone) if named != "real" else []
    print(*held, sep="\n")
    raise SystemExit(0 if all(bar.kept for bar in held) else 1)


if __name__ == "__main__":
    main()
