"""One benchmark: settings in, report out."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import assert_never

import uvloop

from bench.client_health import judge, watch_loop
from bench.load import Run, Send, closed_loop, open_loop, poisson_arrivals
from bench.measure import Outcome, Result, Slo, figures
from bench.openai_stream import BenchFailed, StreamClient, Target, open_client, parse_target
from bench.prompts import Workload
from bench.report import Report, TargetReport
from bench.trace_file import file_workload
from bench.workloads import SYNTHETIC, synthetic_workload
from wire.config import BenchConfig, env_fields
from wire.errors import ConfigInvalid

DEFAULT_REQUESTS = 100
URL, COMPARE = "PHASEMESH_URL", "PHASEMESH_BENCH_COMPARE"
WORKLOAD, RATE = "PHASEMESH_BENCH_WORKLOAD", "PHASEMESH_BENCH_RATE"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class OpenLoop:
    arrivals_s: Sequence[float]
    max_in_flight: int
    words: str


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    concurrency: int
    words: str


def run_bench(config: BenchConfig, url: str, api_key: str | None, say: Say) -> Report:
    """Raises ConfigInvalid before anything is sent, and BenchFailed when a server does not answer."""
    targets = [replace(parse_target(url, URL), api_key=api_key)]
    if config.compare:
        # Not the first server's key: it is nobody else's business.
        targets.append(replace(parse_target(config.compare, COMPARE), api_key=config.compare_api_key))
    targets = [replace(target, ignore_eos=config.ignore_eos) for target in targets]
    load = _load(config, workload := _workload(config))
    for target in targets:
        for request in (*workload.requests, *workload.warm_up):
            target.check(request)
    _allow_many_connections()
    return uvloop.run(_run(config, targets, workload, load, say))


def _allow_many_connections() -> None:
    """As many open files as the process may have: each request in flight is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _workload(config: BenchConfig) -> Workload:
    name = config.workload
    if name in SYNTHETIC:
        number = config.requests or DEFAULT_REQUESTS
        return synthetic_workload(name, requests=number, warm_up=config.warm_up, seed=config.seed, scale=config.scale)
    if not name.endswith(".jsonl"):
        names = ", ".join(SYNTHETIC)
        raise ConfigInvalid(f"{WORKLOAD}={name!r}: one of {names}, or a file that ends in .jsonl", param=WORKLOAD)
    return file_workload(Path(name), requests=config.requests, warm_up=config.warm_up, param=WORKLOAD)


def _load(config: BenchConfig, workload: Workload) -> OpenLoop | ClosedLoop:
    if config.rate is not None and config.concurrency is not None:
        raise ConfigInvalid("give --rate (open loop) or --concurrency (closed loop), not both", param=RATE)
    if config.concurrency is not None:
        return ClosedLoop(config.concurrency, f"closed loop, {config.concurrency} client(s)")
    if config.rate is not None:
        if not 0 < config.rate < float("inf"):
            raise ConfigInvalid(f"{RATE}={str(config.rate)!r}: more than 0", param=RATE)
        arrivals_s = poisson_arrivals(config.rate, len(workload.requests), config.seed)
        return OpenLoop(arrivals_s, config.max_in_flight, f"open loop, {config.rate:g} requests/s by Poisson")
    times_s = [request.at_s for request in workload.requests if request.at_s is not None]
    if not times_s:
        raise ConfigInvalid("give --rate (open loop) or --concurrency (closed loop)", param=RATE)
    return OpenLoop(times_s, config.max_in_flight, "open loop, at the times in the file")


async def _run(
    config: BenchConfig, targets: Sequence[Target], workload: Workload, load: OpenLoop | ClosedLoop, say: Say
) -> Report:
    async with open_client(timeout_s=config.timeout_s) as client:
        named = [replace(t, model=config.model or await client.first_model(t)) for t in targets]
        say(f"warm-up: {len(workload.warm_up)} requests to each server, not measured")
        for target in named:
            await _warm_up(client, target, workload)
        say(f"{workload.name}: {len(workload.requests)} requests to each server, {load.words}")

        async def send(target: int, index: int, due_s: float | None) -> Outcome:
            return await client.send(named[target], workload.requests[index], due_s)

        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        async with watch_loop() as watch:
            runs = await _drive(load, send, len(workload.requests), len(named))
    slo = Slo(config.slo_ttft_ms, config.slo_itl_ms)
    reports = [
        TargetReport(target.url, target.model, figures(run.outcomes, run.duration_s, slo))
        for target, run in zip(named, runs, strict=True)
    ]
    health = judge(watch, [outcome for run in runs for outcome in run.outcomes])
    return Report(started_at, _settings(config, workload), load.words, reports, health)


async def _warm_up(client: StreamClient, target: Target, workload: Workload) -> None:
    """One after the other. Raises BenchFailed when none came through: the run would measure only that."""
    outcomes = [await client.send(target, request) for request in workload.warm_up]
    if outcomes and all(outcome.result is not Result.OK for outcome in outcomes):
        detail = f": {outcomes[0].detail}" if outcomes[0].detail else ""
        raise BenchFailed(f"{target.url}: no warm-up request came through ({outcomes[0].reason}{detail})")


async def _drive(load: OpenLoop | ClosedLoop, send: Send, requests: int, targets: int) -> list[Run]:
    match load:
        case OpenLoop(arrivals_s, max_in_flight):
            return await open_loop(send, arrivals_s, targets, max_in_flight=max_in_flight, clock=time.perf_counter)
        case ClosedLoop(concurrency):
            return await closed_loop(send, requests, targets, concurrency=concurrency, clock=time.perf_counter)
        case _:
            assert_never(load)


def _settings(config: BenchConfig, workload: Workload) -> dict[str, object]:
    """Every option but keys and the path of the report."""
    left_out = ("compare_api_key", "json")
    given = {f.name: getattr(config, f.name) for f in env_fields(BenchConfig) if f.name not in left_out}
    return {**given, "workload": workload.name, "requests": len(workload.requests)}
