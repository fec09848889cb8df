"""How soon prompts are read: `python -m bench.prefill --url http://127.0.0.1:8000`.

    one prompt of 2,000 random token ids   TTFT cold, then the same prompt again: TTFT cached
    eight prompts of 128 at once           prompt tokens/s until the last one's first token

against any OpenAI-compatible server, nothing else asking. A round whose first prompt was partly cached is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import uvloop

from bench.long_prompt import TIMEOUT_S, random_prompt
from bench.measure import Outcome, Result
from bench.openai_stream import BenchFailed, StreamClient, Target, open_client, parse_target
from wire.errors import MeshError

OUTPUT_TOKENS = 4
BATCH, BATCH_PROMPT_TOKENS = 8, 128


@dataclass(frozen=True, slots=True)
class Round:
    cold_s: float
    cached_s: float
    tokens_s: float


async def run_round(client: StreamClient, target: Target, prompt_tokens: int, rng: random.Random) -> Round:
    """Raises BenchFailed when the round does not show what it should."""
    prompt = random_prompt(rng, prompt_tokens, OUTPUT_TOKENS)
    cold = await client.send(target, prompt)
    cached = await client.send(target, prompt)
    batch = [random_prompt(rng, BATCH_PROMPT_TOKENS, 1) for _ in range(BATCH)]
    return judge(cold, cached, await asyncio.gather(*(client.send(target, prompt) for prompt in batch)))


def judge(cold: Outcome, cached: Outcome, batch: Sequence[Outcome]) -> Round:
    """Raises BenchFailed when a request failed, or the cold prompt was not cold."""
    for outcome in (cold, cached, *batch):
        if outcome.result is not Result.OK:
            raise BenchFailed(f"a request failed: {outcome.reason} {outcome.detail}")
    if cold.cached_tokens:
        raise BenchFailed(f"{cold.cached_tokens} tokens of the prompt were cached: another --seed")
    took_s = max(outcome.token_event_times_s[0] for outcome in batch) - min(outcome.sent_s for outcome in batch)
    return Round(_ttft_s(cold), _ttft_s(cached), len(batch) * BATCH_PROMPT_TOKENS / took_s)


def _ttft_s(outcome: Outcome) -> float:
    return outcome.token_event_times_s[0] - outcome.sent_s


async def measure(target: Target, prompt_tokens: int, rounds: int, seed: int) -> list[Round]:
    """One round after the other, each printed as it ends."""
    rng = random.Random(f"prefill {seed}")
    results = []
    async with open_client(timeout_s=TIMEOUT_S) as client:
        named = target if target.model else replace(target, model=await client.first_model(target))
        await client.send(named, random_prompt(rng, 16, OUTPUT_TOKENS))  # warm-up
        print(f"{'round':>8} {'cold ms':>9} {'cached ms':>10} {'tokens/s':>9}")
        for number in range(rounds):
            results.append(await run_round(client, named, prompt_tokens, rng))
            print(_row(str(number + 1), results[-1:]), flush=True)
    return results


def _row(name: str, rounds: Sequence[Round]) -> str:
    cold_s, cached_s = statistics.median(r.cold_s for r in rounds), statistics.median(r.cached_s for r in rounds)
    tokens_s = statistics.median(r.tokens_s for r in rounds)
    return f"{name:>8} {1e3 * cold_s:9.0f} {1e3 * cached_s:10.1f} {tokens_s:9.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server; default: %(default)s")
    parser.add_argument("--model", default="", help="default: the first the server names")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="the long prompt; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: %(default)s")
    asked = parser.parse_args()
    try:
        target = replace(parse_target(asked.url, "--url"), path="/v1/completions", model=asked.model)
        rounds = uvloop.run(measure(target, asked.prompt_tokens, asked.rounds, asked.seed))
    except MeshError as error:
        raise SystemExit(f"bench.prefill: {error.message}") from None
    print(_row("median", rounds))


if __name__ == "__main__":
    main()
