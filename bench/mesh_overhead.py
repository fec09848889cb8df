"""What the mesh around a worker costs: `python -m bench.mesh_overhead [CASE]…`.

Starts `phasemesh up --simulate` and loads it from one lean client process; every token that arrives is held against
the prediction. Four cases, each a stack of its own:

    throughput   a step takes no time: output tokens per second, one event each, at each number of streams
    stepped      the same with steps of 5.8 ms: each stream asks for 171 tokens per second
    paced        16 streams of 50 tokens per second, pauses between requests: TTFT and ITL added to the steps' own time
    idle         1,000 streams of about 2 tokens per second: none missed
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

from bench.measure import percentile
from bench.openai_stream import BenchFailed
from bench.overhead_client import Result, Run
from bench.stack import Stack, model_facts, running_stack

CLIENT_TIMEOUT_S = 300.0
"""Beyond the time a run is meant to take: its last answers, and the check of every token."""
PACED_STEP_S = 0.020
PACED_STREAMS = 16
IDLE_STREAMS = 1000
IDLE_DECODE_US = 500
CASES = ("throughput", "stepped", "paced", "idle")
SERVICES = ("gateway", "scheduler", "redis", "worker", "client")


def simulated(variables: dict[str, str]) -> AbstractContextManager[Stack]:
    return running_stack(["--simulate"], {"STEP_TOKEN_BUDGET": "2048", "KV_PAGES": "16384"} | variables)


def on(stack: Stack, run: Run, **changes: Any) -> Run:
    """The run, of this stack and its processes."""
    pids = {name.removesuffix("-1"): pid for name, pid in stack.pids().items()}
    return replace(run, url=stack.url, pids=pids, **changes)


def run_client(run: Run) -> Result:
    done = subprocess.run(
        [sys.executable, "-m", "bench.overhead_client"],
        input=json.dumps(asdict(run)).encode(),
        stdout=subprocess.PIPE,
        check=True,
        timeout=run.warm_up_s + run.measure_s + CLIENT_TIMEOUT_S,
    )
    return Result(**json.loads(done.stdout))


def check(result: Result) -> str:
    """How sound a run was; raises SystemExit when it was not."""
    if result.wrong:
        raise SystemExit(f"{result.wrong} of {result.requests} answers are not as predicted: {result.example}")
    if result.events_of_many:
        raise SystemExit(f"{result.events_of_many} events carried more than one token")
    return f"{result.requests} answers, every token as predicted"


def ms(values_s: list[float], share: float) -> float:
    return 1000 * percentile(sorted(values_s), share)


def cpu_columns(result: Result) -> str:
    """µs of CPU per token, by service and in all."""
    each = [1e6 * result.cpu_s[name] / result.tokens for name in SERVICES]
    return " ".join(f"{us:9.1f}" for us in (*each, sum(each)))


CPU_HEAD = " ".join(f"{name:>9}" for name in (*SERVICES, "all"))


def throughput(run: Run, counts: list[int], step_us: float) -> None:
    print(f"\nthroughput: a step takes {step_us / 1000:g} ms; CPU in µs per token")
    print(f"{'streams':>7} {'tok/s':>8} {'TTFT p50':>9} {'p99 ms':>8} {'at once p50':>11} {'ITL p50':>8} {CPU_HEAD}")
    with simulated({"SIMULATED_FIXED_US": str(step_us)}) as stack:
        for streams in counts:
            result = run_client(on(stack, run, streams=streams))
            ttft = result.ttft_s or result.first_wave_ttft_s
            print(
                f"{streams:7} {result.tokens / result.measured_s:8.0f} {ms(ttft, 0.5):9.1f} {ms(ttft, 0.99):8.1f} "
                f"{ms(result.first_wave_ttft_s, 0.5):11.1f} {ms(result.gap_s, 0.5):8.2f} {cpu_columns(result)}"
                f"   {check(result)}",
                flush=True,
            )


def paced(run: Run) -> None:
    """A request that comes at any time waits for the running step, evenly up to one, and then for its own: with
    nothing added TTFT lies evenly in [1, 2) steps."""
    print(f"\npaced: {PACED_STREAMS} streams of {1 / PACED_STEP_S:.0f} tok/s; added to the steps' own time, in ms")
    print(f"{'TTFT p50':>8} {'p99':>6} {'ITL p50':>8} {'p99':>6} {'tok/s':>8} {CPU_HEAD}")
    run = replace(run, streams=PACED_STREAMS, output_tokens=50, think_s=10 * PACED_STEP_S)
    with simulated({"SIMULATED_FIXED_US": f"{1e6 * PACED_STEP_S:.0f}"}) as stack:
        result = run_client(on(stack, run))
        ttft_ms = [ms(result.ttft_s, share) - 1000 * PACED_STEP_S * (1 + share) for share in (0.5, 0.99)]
        gap_ms = [ms(result.gap_s, share) - 1000 * PACED_STEP_S for share in (0.5, 0.99)]
        print(
            f"{ttft_ms[0]:8.2f} {ttft_ms[1]:6.2f} {gap_ms[0]:8.2f} {gap_ms[1]:6.2f} "
            f"{result.tokens / result.measured_s:8.0f} {cpu_columns(result)}   {check(result)}"
        )


def idle(run: Run) -> None:
    print(f"\nidle: {IDLE_STREAMS} streams, {IDLE_DECODE_US} µs per decode; CPU in µs per token")
    print(f"{'streams':>7} {'tok/s':>8} {CPU_HEAD}")
    with simulated({"SIMULATED_DECODE_TOKEN_US": str(IDLE_DECODE_US)}) as stack:
        result = run_client(on(stack, run, streams=IDLE_STREAMS, output_tokens=24))
        print(f"{IDLE_STREAMS:7} {result.tokens / result.measured_s:8.0f} {cpu_columns(result)}   {check(result)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--streams", default="1,16,64,256,1000", help="of the first two cases, comma-separated")
    parser.add_argument("--step-ms", type=float, default=5.8, help="of the stepped case")
    parser.add_argument("--prompt-words", type=int, default=64, help="of each request, about a token each")
    parser.add_argument("--output-tokens", type=int, default=128, help="of each request in the throughput case")
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds")
    parser.add_argument("--seconds", type=float, default=8.0, help="measured, per row")
    asked = parser.parse_args()
    cases = asked.cases or list(CASES)
    if unknown := set(cases) - set(CASES):
        parser.error(f"no case {sorted(unknown)[0]!r}")
    run = Run(
        url="",
        pids={},
        streams=1,
        prompt_words=asked.prompt_words,
        output_tokens=asked.output_tokens,
        think_s=0.0,
        warm_up_s=asked.warm_up,
        measure_s=asked.seconds,
        **asdict(model_facts()),
    )
    counts = [int(count) for count in asked.streams.split(",")]
    try:
        for case in cases:
            match case:
                case "throughput":
                    throughput(run, counts, 0.0)
                case "stepped":
                    throughput(run, counts, 1000 * asked.step_ms)
                case "paced":
                    paced(run)
                case _:
                    idle(run)
    except BenchFailed as error:
        raise SystemExit(f"bench.mesh_overhead: {error.message}") from None


if __name__ == "__main__":
    main()
