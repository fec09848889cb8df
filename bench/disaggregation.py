"""Decodes beside long prompts, three ways, in one run: `python -m bench.disaggregation [--virtual | --real]`.

| arm | workers | traffic |
|---|---|---|
| undisturbed | all of role `both` | steady chat only |
| colocated | all of role `both` | the same chats, and a prompt of 4,000 tokens every 3 s, prefilled beside decodes |
| disaggregated | some `prefill`, the rest `decode` | the same |

ITL is that of the chats' tokens: what a long prompt does to those who are reading. Goodput counts chats that kept both
SLOs. By default on simulated workers behind a whole stack of processes; --virtual runs the engine without processes
(bench/simulator.py), --real the model on two workers. The bar, of simulated workers: disaggregated ITL p99 at most
1.3 × the undisturbed one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from bench.live_load import Measured, run_load
from bench.measure import Figures, Outcome, Slo, figures
from bench.openai_stream import BenchFailed
from bench.prefix_workloads import MixedShape, mixed_traffic
from bench.prompts import PromptRequest
from bench.simulated_cost import COST as ROUTING_COST
from bench.simulated_cost import PAGE_SIZE, PULL_COST, STEP_TOKEN_BUDGET, simulated_variables
from bench.simulator import Simulation, WorkerShape, new_engine
from bench.stack import running_stack
from wire.config import BatchingConfig
from wire.plan import Role

ITL_BAR = 1.3
COST = replace(ROUTING_COST, prefill_token_us=200)
"""5,000 prefill tokens/s: a long prompt is 0.8 s of a worker."""
ROUTING = "precise"
DEFAULTS = (  # option, simulated, real: a model of 135M parameters on one core prefills some 450 tokens/s
    ("workers", 4, 2),
    ("chats_per_s", 12.0, 0.4),
    ("long_every_s", 3.0, 20.0),
    ("seconds", 30.0, 60.0),
    ("itl_target_ms", 60.0, 120.0),
    ("slo_ttft_ms", 500.0, 5000.0),
    ("slo_itl_ms", 45.0, 150.0),
)


class Arm(StrEnum):
    UNDISTURBED = "undisturbed"
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True)
class Cell:
    """What is measured on."""

    kind: str
    """virtual | simulated | real."""
    workers: int
    prefill_workers: int
    """Of them, in the disaggregated arm."""
    pages: int
    """Of each worker."""
    itl_target_ms: float

    def roles(self, arm: Arm) -> list[Role]:
        if arm is not Arm.DISAGGREGATED:
            return [Role.BOTH] * self.workers
        return [Role.PREFILL] * self.prefill_workers + [Role.DECODE] * (self.workers - self.prefill_workers)


@dataclass(slots=True)
class ArmResult:
    """All rounds of one arm, chats and long prompts apart."""

    chats: list[Outcome] = field(default_factory=list)
    longs: list[Outcome] = field(default_factory=list)
    duration_s: float = 0.0
    cpu_shares: list[float] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, measured: Measured, shape: MixedShape) -> None:
        for outcome in measured.outcomes:
            is_long = outcome.prompt_tokens == shape.long_prompt_tokens
            (self.longs if is_long else self.chats).append(outcome)
        self.duration_s += measured.duration_s
        self.cpu_shares.append(measured.cpu_share)
        self.warnings += measured.warnings

    def of_chats(self, slo: Slo) -> Figures:
        return figures(self.chats, self.duration_s, slo)


def measure_once(cell: Cell, arm: Arm, requests: Sequence[PromptRequest], seed: int) -> Measured:
    """One arm, one round, on a cell of its own with empty caches."""
    roles = cell.roles(arm)
    if cell.kind == "virtual":
        config = BatchingConfig(step_token_budget=STEP_TOKEN_BUDGET, itl_target_ms=cell.itl_target_ms, routing=ROUTING)
        shapes = [WorkerShape(COST, cell.pages, PAGE_SIZE, role, pull=PULL_COST) for role in roles]
        run = Simulation(new_engine(config, seed=seed), shapes).run(requests)
        return Measured(run.outcomes, run.duration_s, 0.0, ())
    variables = {
        "ROUTING": ROUTING,
        "ROLES": ",".join(roles),
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


def compare(cell: Cell, shape: MixedShape, rounds: int) -> dict[Arm, ArmResult]:
    """Every arm on every round's chats; the arms' order turns from round to round, so that drift favours none."""
    results = {arm: ArmResult() for arm in Arm}
    for number in range(rounds):
        turn = number % len(Arm)
        for arm in (*list(Arm)[turn:], *list(Arm)[:turn]):
            traffic = replace(shape, long_every_s=0.0) if arm is Arm.UNDISTURBED else shape
            results[arm].add(measure_once(cell, arm, mixed_traffic(traffic, number), number), shape)
            print(f"  round {number + 1}, {arm.value}: {len(results[arm].chats)} chats so far", flush=True)
    return results


HEAD = (
    f"{'arm':<14} {'ITL p50':>8} {'p90':>7} {'p99':>7} {'max ms':>8} {'TTFT p50':>9} {'p99 ms':>8} {'goodput/s':>9} "
    f"{'share':>6} {'not ok':>6} {'long TTFT p50':>13} {'max ms':>8} {'CPU':>5} {'ITL p99':>8}"
)


def table(results: dict[Arm, ArmResult], slo: Slo) -> str:
    """A row for each arm; the last column is its ITL p99 ÷ the undisturbed one's."""
    lines = [f"{HEAD} ÷ undisturbed"]
    for arm, result in results.items():
        f = result.of_chats(slo)
        if f.itl_ms is None or f.ttft_ms is None or f.goodput is None:
            raise BenchFailed(f"{arm.value}: no chat came through: {f.reasons}")
        longs = figures(result.longs, result.duration_s, slo).ttft_ms
        failed = len(result.chats) + len(result.longs) - sum(o.result == "ok" for o in result.chats + result.longs)
        lines.append(
            f"{arm.value:<14} {f.itl_ms.p50:8.1f} {f.itl_ms.p90:7.1f} {f.itl_ms.p99:7.1f} {f.itl_ms.max:8.1f} "
            f"{f.ttft_ms.p50:9.1f} {f.ttft_ms.p99:8.1f} {f.goodput.requests_per_s:9.2f} {f.goodput.share:6.1%} "
            f"{failed:6} {longs.p50 if longs else 0:13.0f} {longs.max if longs else 0:8.0f} "
            f"{max(result.cpu_shares):5.0%} {itl_ratio(results, arm):8.2f}"
        )
    lines += [f"warning, {arm.value}: {text}" for arm, result in results.items() for text in result.warnings]
    return "\n".join(lines)


def itl_ratio(results: dict[Arm, ArmResult], arm: Arm) -> float:
    """p99 ITL of an arm's chats ÷ that of the undisturbed ones."""
    ours, undisturbed = (results[a].of_chats(Slo()).itl_ms for a in (arm, Arm.UNDISTURBED))
    if ours is None or undisturbed is None:
        raise BenchFailed(f"{arm.value}: no gap between tokens was seen")
    return ours.p99 / undisturbed.p99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--virtual", action="store_true", help="the engine alone, in virtual time")
    kind.add_argument("--real", action="store_true", help="the model, not simulated workers")
    parser.add_argument("--workers", type=int, help="default: 4; with --real 2")
    parser.add_argument("--prefill-workers", type=int, default=1, help="of them, disaggregated; default: %(default)s")
    parser.add_argument("--pages", type=int, default=1024, help="of 64 tokens, of each; default: %(default)s")
    parser.add_argument("--chats-per-s", type=float, help="default: 12; with --real 0.4")
    parser.add_argument("--long-every-s", type=float, help="default: 3; with --real 20")
    parser.add_argument("--long-prompt-tokens", type=int, default=4000, help="default: %(default)s")
    parser.add_argument("--seconds", type=float, help="of arrivals, of a round; default: 30; with --real 60")
    parser.add_argument("--rounds", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--itl-target-ms", type=float, help="default: 60; with --real 120")
    parser.add_argument("--slo-ttft-ms", type=float, help="default: 500; with --real 5000")
    parser.add_argument("--slo-itl-ms", type=float, help="of 99 %% of a chat's gaps; default: 45; with --real 150")
    asked = parser.parse_args()
    named = "virtual" if asked.virtual else "real" if asked.real else "simulated"
    for name, simulated, real in DEFAULTS:
        if getattr(asked, name) is None:
            setattr(asked, name, real if asked.real else simulated)
    workers = asked.workers
    if not 0 < asked.prefill_workers < workers:
        parser.error(f"--prefill-workers {asked.prefill_workers}: at least 1, and fewer than the {workers} workers")
    cell = Cell(named, workers, asked.prefill_workers, asked.pages, asked.itl_target_ms)
    shape = MixedShape(
        asked.seconds,
        asked.chats_per_s,
        long_every_s=asked.long_every_s,
        long_prompt_tokens=asked.long_prompt_tokens,
    )
    slo = Slo(asked.slo_ttft_ms, asked.slo_itl_ms)
    print(
        f"{workers} {named} workers, {cell.prefill_workers} of them for prefill when disaggregated; "
        f"{asked.chats_per_s:g} chats/s, a prompt of {asked.long_prompt_tokens} tokens every {asked.long_every_s:g} s; "
        f"SLO: TTFT {asked.slo_ttft_ms:g} ms, ITL {asked.slo_itl_ms:g} ms"
    )
    try:
        results = compare(cell, shape, asked.rounds)
        print(table(results, slo))
        ratio = itl_ratio(results, Arm.DISAGGREGATED)
    except BenchFailed as error:
        raise SystemExit(f"bench.disaggregation: {error.message}") from None
    is_kept = named == "real" or ratio <= ITL_BAR
    if named != "real":
        print(f"bar: ITL p99 disaggregated ÷ undisturbed ≤ {ITL_BAR:g}: {ratio:.2f}, {'kept' if is_kept else 'MISSED'}")
    raise SystemExit(0 if is_kept else 1)


if __name__ == "__main__":
    main()
