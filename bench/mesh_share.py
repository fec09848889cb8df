"""What share of the engine's own throughput is left behind the mesh: `python -m bench.mesh_share [--streams 1,8,32]`.

Two arms in turns, each in processes of its own, with the same model, prompts and configuration (the environment's):

    in process   scheduler.engine and gpu_worker.executor in one process (bench.in_process)
    mesh         `phasemesh up`: gateway, Redis, scheduler, gRPC, worker; and one streaming client

A stream sends its next prompt when its last has ended. The bar: the mesh reaches 95 % at every number of streams.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import uvloop

from bench.in_process import Round
from bench.load import closed_loop
from bench.measure import Result
from bench.openai_stream import COMPLETIONS, BenchFailed, Target, open_client
from bench.prompts import PromptRequest, TokenIds
from bench.stack import running_stack
from wire.errors import MeshError

TOKEN_IDS = range(1000, 20_000)
"""Ordinary tokens of any vocabulary."""
TIMEOUT_S = 300.0
"""Of a request, and of all rounds in process."""
STOP_TIMEOUT_S = 60.0


def rounds_of(streams: Sequence[int], waves: int, prompt_tokens: int, output_tokens: int, seed: int) -> list[Round]:
    """One of each number of streams, after one that warms up; no prompt comes twice."""
    rng = random.Random(f"mesh share {seed}")

    def prompts(number: int) -> list[list[int]]:
        return [[rng.choice(TOKEN_IDS) for _ in range(prompt_tokens)] for _ in range(number)]

    # Few streams end sooner: more waves for as long a look.
    made = [Round(n, output_tokens, prompts(n * waves * max(1, 8 // n))) for n in streams]
    return [Round(max(streams), output_tokens, prompts(max(streams))), *made]


def in_process(rounds: Sequence[Round]) -> list[float]:
    """Tokens per second of each."""
    with _child() as child:
        assert child.stdin is not None and child.stdout is not None
        taken = []
        for load in rounds:
            child.stdin.write(json.dumps(asdict(load)) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            if not answer:
                raise BenchFailed("bench.in_process ended before it answered")
            taken.append(json.loads(answer))
        return [_rate(load, seconds) for load, seconds in zip(rounds, taken, strict=True)]


@contextmanager
def _child() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "bench.in_process"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    overdue = threading.Timer(TIMEOUT_S, child.kill)  # whoever waits for an answer then finds the end of it
    overdue.start()
    try:
        yield child
    finally:
        overdue.cancel()
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(STOP_TIMEOUT_S)
        finally:
            child.kill()


def mesh(rounds: Sequence[Round]) -> list[float]:
    """Tokens per second of each."""
    prefix = "PHASEMESH_"
    own = {name.removeprefix(prefix): value for name, value in os.environ.items() if name.startswith(prefix)}
    with running_stack([], own) as stack:
        return [_rate(load, uvloop.run(_ask(stack.url, load))) for load in rounds]


async def _ask(url: str, load: Round) -> float:
    async with open_client(timeout_s=TIMEOUT_S) as client:
        target = Target(url, COMPLETIONS)
        target = replace(target, model=await client.first_model(target))
        requests = [PromptRequest(TokenIds(prompt), load.output_tokens) for prompt in load.prompts]
        [run] = await closed_loop(
            lambda _, index, due_s: client.send(target, requests[index], due_s),
            len(requests),
            1,
            concurrency=load.streams,
            clock=time.perf_counter,
        )
    if failed := [outcome for outcome in run.outcomes if outcome.result is not Result.OK]:
        raise BenchFailed(f"{len(failed)} requests failed: {failed[0].reason} {failed[0].detail}")
    return run.duration_s


def _rate(load: Round, seconds: float) -> float:
    return len(load.prompts) * load.output_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,8,32", help="comma-separated; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="of both arms; default: %(default)s")
    parser.add_argument("--waves", type=int, default=2, help="prompts of a stream; default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=int, default=64, help="default: %(default)s")
    asked = parser.parse_args()
    streams = [int(number) for number in asked.streams.split(",")]
    rates: dict[str, list[list[float]]] = {"in process": [], "mesh": []}
    arms = {"in process": in_process, "mesh": mesh}
    try:
        for number in range(asked.rounds):
            rounds = rounds_of(streams, asked.waves, asked.prompt_tokens, asked.output_tokens, number)
            for name in arms if number % 2 == 0 else reversed(arms):
                rates[name].append(arms[name](rounds)[1:])
                print(f"round {number + 1}, {name}: {' '.join(f'{rate:.1f}' for rate in rates[name][-1])}", flush=True)
    except MeshError as error:
        raise SystemExit(f"bench.mesh_share: {error.message}") from None
    print(f"{'streams':>7} {'in process tok/s':>16} {'mesh tok/s':>10} {'share':>6}  medians of {asked.rounds} rounds")
    for at, number in enumerate(streams):
        own, meshed = (statistics.median(rates[name][r][at] for r in range(asked.rounds)) for name in rates)
        share = statistics.median(m[at] / o[at] for o, m in zip(*rates.values(), strict=True))
        print(f"{number:7} {own:16.1f} {meshed:10.1f} {share:6.1%}")


if __name__ == "__main__":
    main()
