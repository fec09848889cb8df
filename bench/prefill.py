"""How soon prompts are read: `python -m bench.prefill --url http://127.0.0.1:8000`.

    one prompt of 2,000 random token ids   TTFT cold, then the same prompt again: TTFT cached
    eight prompts of 128 at once           prompt tokens/s until the last one's first token

against any OpenAI-compatible server, nothing else asking. A round whose first prompt was partly cached is refused.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.measure import Outcome, Result
from bench.openai_stream import BenchFailed, StreamClient, Target
from bench.server_rounds import Rounds, random_prompt, server_arguments

OUTPUT_TOKENS = 4
BATCH, BATCH_PROMPT_TOKENS = 8, 128


@dataclass(frozen=True, slots=True)
class Round:
    cold_s: float
    cached_s: float
    tokens_s: float


async def run_round(prompt_tokens: int, client: StreamClient, target: Target, rng: random.Random) -> Round:
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


def _row(name: str, rounds: Sequence[Round]) -> str:
    cold_s, cached_s = statistics.median(r.cold_s for r in rounds), statistics.median(r.cached_s for r in rounds)
    tokens_s = statistics.median(r.tokens_s for r in rounds)
    return f"{name:>8} {1e3 * cold_s:9.0f} {1e3 * cached_s:10.1f} {tokens_s:9.0f}"


def main() -> None:
    parser = server_arguments(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="the long prompt; default: %(default)s")
    asked = parser.parse_args()
    head = f"{'round':>8} {'cold ms':>9} {'cached ms':>10} {'tokens/s':>9}"
    Rounds("bench.prefill", head, partial(run_round, asked.prompt_tokens), _row).main(asked)


if __name__ == "__main__":
    main()
