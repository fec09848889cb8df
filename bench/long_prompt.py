"""What a long prompt does to those who are already reading: `python -m bench.long_prompt --url http://127.0.0.1:8000`.

    streams   | token | token | token  …  token | token | …        their ITL in between: p50, p99, max
    prompt                    | sent ……………………… first token |       its TTFT

Each round starts the streams, waits until they decode, sends one prompt of random token ids (nothing of it is cached),
and looks at the gaps between the streams' tokens while that prompt is prefilled. A round whose streams end before the
long prompt's first token, or whose prompt was partly cached, is refused: it would flatter the server.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bench.measure import Outcome, Percentiles, Result, percentiles_ms
from bench.openai_stream import BenchFailed, StreamClient, Target
from bench.server_rounds import Rounds, random_prompt, server_arguments

STREAM_PROMPT_TOKENS = 32
LONG_OUTPUT_TOKENS = 4
STAGGER_S = 0.05
"""Between the starts of two streams, so that they are not in step."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What one round asks."""

    streams: int
    stream_tokens: int
    """Output of each stream: enough to outlast the long prompt."""
    prompt_tokens: int
    settle_s: float
    """The streams decode for so long before the prompt is sent."""


@dataclass(frozen=True, slots=True)
class Round:
    before_ms: Percentiles
    """ITL of the streams until the prompt is sent."""
    beside_ms: Percentiles
    """ITL of the streams from then to the prompt's first token."""
    ttft_s: float


async def run_round(shape: Shape, client: StreamClient, target: Target, rng: random.Random) -> Round:
    """Raises BenchFailed when the round does not show what it should."""
    prompts = [random_prompt(rng, STREAM_PROMPT_TOKENS, shape.stream_tokens) for _ in range(shape.streams)]
    async with asyncio.TaskGroup() as tasks:
        streams = []
        for prompt in prompts:
            streams.append(tasks.create_task(client.send(target, prompt)))
            await asyncio.sleep(STAGGER_S)
        await asyncio.sleep(shape.settle_s)
        long = await client.send(target, random_prompt(rng, shape.prompt_tokens, LONG_OUTPUT_TOKENS))
    return judge([task.result() for task in streams], long)


def judge(streams: Sequence[Outcome], long: Outcome) -> Round:
    """What the streams saw of the long prompt. Raises BenchFailed when the round does not show what it should."""
    for outcome in (*streams, long):
        if outcome.result is not Result.OK:
            raise BenchFailed(f"a request failed: {outcome.reason} {outcome.detail}")
    if long.cached_tokens:
        raise BenchFailed(f"{long.cached_tokens} tokens of the long prompt were cached: another --seed")
    assert long.ttft_s is not None  # it is OK, so it has a token
    first_s = long.due_s + long.ttft_s
    if any(stream.token_event_times_s[-1] < first_s for stream in streams):
        raise BenchFailed("a stream ended before the long prompt's first token: more --stream-tokens")
    before = percentiles_ms(gap for stream in streams for gap in _gaps(stream, 0.0, long.due_s))
    beside = percentiles_ms(gap for stream in streams for gap in _gaps(stream, long.due_s, first_s))
    if before is None or beside is None:
        raise BenchFailed("the streams did not decode yet when the long prompt was sent: more --settle-s")
    return Round(before, beside, long.ttft_s)


def _gaps(stream: Outcome, from_s: float, to_s: float) -> list[float]:
    """Gaps between tokens that overlap (from_s, to_s), a stall that began before or ended after among them."""
    gaps = itertools.pairwise(stream.token_event_times_s)
    return [later - earlier for earlier, later in gaps if later > from_s and earlier < to_s]


def _row(name: str, rounds: Sequence[Round]) -> str:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    before, p50, p99 = (
        median([r.before_ms.p50 for r in rounds]),
        median([r.beside_ms.p50 for r in rounds]),
        median([r.beside_ms.p99 for r in rounds]),
    )
    worst = max(r.beside_ms.max for r in rounds)
    return f"{name:>8} {before:11.1f} {p50:9.1f} {p99:9.1f} {worst:9.1f}    {median([r.ttft_s for r in rounds]):8.2f}"


def main() -> None:
    parser = server_arguments(__doc__)
    parser.add_argument("--streams", type=int, default=4, help="decoding streams; default: %(default)s")
    parser.add_argument("--stream-tokens", type=int, default=400, help="output of each; default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="the long prompt; default: %(default)s")
    parser.add_argument("--settle-s", type=float, default=2.0, help="decode before it; default: %(default)s")
    asked = parser.parse_args()
    shape = Shape(asked.streams, asked.stream_tokens, asked.prompt_tokens, asked.settle_s)
    head = f"{'round':>8} {'before p50':>11} {'ITL p50':>9} {'p99':>9} {'max':>9} ms {'TTFT':>8} s"
    Rounds("bench.long_prompt", head, partial(run_round, shape), _row).main(asked)


if __name__ == "__main__":
    main()
