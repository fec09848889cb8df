"""One stream through a whole stack, against reading the weights once: `python -m bench.one_stream`.

    stack with float32 weights:  memory read | 4 answers, their TPOT | memory read     … bfloat16, int8, the next round

A decode step of one sequence reads every weight (of a model whose embedding is its head), so its time is held against
what torch's threads need to read as many bytes in the same minute: memory is not equally fast from one to the next.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
import uvloop

from bench.measure import Outcome, Result
from bench.openai_stream import BenchFailed, Target, open_client
from bench.server_rounds import random_prompt
from bench.stack import running_stack
from bench.startup import weight_files

WEIGHT_DTYPES = ("float32", "bfloat16", "int8")
READ_BYTES = 512 << 20
READS = 12
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 128
ANSWERS = 4
TIMEOUT_S = 120.0


def read_bytes_per_s(buffer: torch.Tensor) -> float:
    taken_s = []
    for _ in range(READS):
        began_s = time.perf_counter()
        buffer.sum()
        taken_s.append(time.perf_counter() - began_s)
    return buffer.nbytes / statistics.median(taken_s)


async def answers(url: str) -> list[Outcome]:
    """One after the other, the first of them to warm up and not returned."""
    rng = random.Random(1)
    async with open_client(timeout_s=TIMEOUT_S) as client:
        target = Target(url, "/v1/completions", await client.first_model(Target(url)))
        return [
            await client.send(target, random_prompt(rng, PROMPT_TOKENS, OUTPUT_TOKENS)) for _ in range(1 + ANSWERS)
        ][1:]


def tpot_s(outcomes: list[Outcome]) -> float:
    """Raises BenchFailed when an answer is not whole."""
    for outcome in outcomes:
        if outcome.result is not Result.OK or outcome.output_tokens != OUTPUT_TOKENS:
            raise BenchFailed(f"a request failed: {outcome.output_tokens} tokens, {outcome.reason} {outcome.detail}")
    spans_s = [outcome.token_event_times_s[-1] - outcome.token_event_times_s[0] for outcome in outcomes]
    return statistics.median(spans_s) / (OUTPUT_TOKENS - 1)


def measure(weight_dtype: str, buffer: torch.Tensor) -> str:
    with running_stack([], {"WEIGHT_DTYPE": weight_dtype}) as stack:
        before = read_bytes_per_s(buffer)
        step_s = tpot_s(uvloop.run(answers(stack.url)))
        read = (before + read_bytes_per_s(buffer)) / 2
        workers = [pid for name, pid in stack.pids().items() if name.startswith("worker")]
        reading_s = sum(weight_files(workers).values()) / read
    return f"{weight_dtype:>9} {read / 1e9:10.1f} {1e3 * reading_s:11.1f} {1e3 * step_s:8.1f} {step_s / reading_s:9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weight-dtypes", nargs="+", choices=WEIGHT_DTYPES, default=WEIGHT_DTYPES)
    parser.add_argument("--threads", type=int, default=2, help="that read")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    buffer = torch.ones(READ_BYTES // 4)
    print(f"{'weights':>9} {'read GB/s':>10} {'reading ms':>11} {'TPOT ms':>8} {'÷ reading':>9}")
    try:
        for _ in range(asked.rounds):
            for weight_dtype in asked.weight_dtypes:
                print(measure(weight_dtype, buffer), flush=True)
    except BenchFailed as error:
        raise SystemExit(f"bench.one_stream: {error.message}") from None


if __name__ == "__main__":
    main()
