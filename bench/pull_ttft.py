"""TTFT of a prompt whose KV lies on another worker: pulled, and computed anew. `python -m bench.pull_ttft`.

    worker X | a stream with prompt A decodes, and leaves no room for another request …
    worker Y |   prompt A: pulled from X ▸ first token │ prompt B, of as many tokens, unknown: computed ▸ first token

Starts a stack of two workers of its own. Both requests of a round meet the same disturbance, one after the other. A
round in which A was not pulled, or B was cached, is refused. The bar: the pulled TTFT is at most 0.35 × the computed
one.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import uvloop

from bench.measure import Outcome, Result
from bench.openai_stream import BenchFailed, StreamClient, Target, open_client, parse_target
from bench.prompts import PromptRequest, TokenIds
from bench.stack import Stack, running_stack
from observability import names
from wire.errors import MeshError
from wire.ids import UNIT_TOKENS

BAR = 0.35
TIMEOUT_S = 120.0
SETTLE_S = 1.0
"""The holder decodes after so long: its own prompt is cached by then."""
HOLDER_TOKENS = 4000
"""More than it gets to: it is cancelled when its round ends."""
OUTPUT_TOKENS = 2
TOKEN_IDS = range(1000, 20_000)
"""Ordinary tokens of any vocabulary."""
VARIABLES = {"MAX_RUNNING": "1"}


@dataclass(frozen=True, slots=True)
class Round:
    pulled_s: float
    """TTFT."""
    computed_s: float


class Rounds:
    """Asks one stack. Prompts have so many tokens; `seed` makes them."""

    def __init__(self, stack: Stack, client: StreamClient, target: Target, prompt_tokens: int, seed: int) -> None:
        self._stack = stack
        self._client = client
        self._target = target
        self._prompt_tokens = prompt_tokens
        self._rng = random.Random(f"pull ttft {seed}")

    async def run(self) -> Round:
        """Raises BenchFailed when the round does not show what it should."""
        held, fresh = self._prompt(), self._prompt()
        await self._ask(held)
        holder = asyncio.create_task(self._client.send(self._target, PromptRequest(held, HOLDER_TOKENS)))
        try:
            await asyncio.sleep(SETTLE_S)
            before = self._pulls()
            pulled = await self._ask(held)
            computed = await self._ask(fresh)
            if holder.done():
                raise BenchFailed("the stream that holds the prefix ended before the round did")
        finally:
            holder.cancel()
            with suppress(asyncio.CancelledError):
                await holder
        if self._pulls() != before + 1 or (pulled.cached_tokens or 0) < self._prompt_tokens - 2 * UNIT_TOKENS:
            raise BenchFailed(f"the prefix was not pulled: {pulled.cached_tokens} of its tokens were cached")
        if computed.cached_tokens:
            raise BenchFailed(f"{computed.cached_tokens} tokens of the unknown prompt were cached: another --seed")
        assert pulled.ttft_s is not None and computed.ttft_s is not None  # they are OK, so they have a token
        return Round(pulled.ttft_s, computed.ttft_s)

    def _prompt(self) -> TokenIds:
        return TokenIds([self._rng.choice(TOKEN_IDS) for _ in range(self._prompt_tokens)])

    async def _ask(self, prompt: TokenIds) -> Outcome:
        outcome = await self._client.send(self._target, PromptRequest(prompt, OUTPUT_TOKENS))
        if outcome.result is not Result.OK:
            raise BenchFailed(f"a request failed: {outcome.reason} {outcome.detail}")
        return outcome

    def _pulls(self) -> float:
        try:
            return self._stack.metric("scheduler", f"{names.SCHEDULER_PULLS}_total", 'outcome="complete"')
        except BenchFailed:  # none so far
            return 0.0


async def measure(stack: Stack, prompt_tokens: int, rounds: int, seed: int) -> list[Round]:
    """One round after the other, each printed as it ends."""
    results: list[Round] = []
    async with open_client(timeout_s=TIMEOUT_S) as client:
        target = replace(parse_target(stack.url, "url"), path="/v1/completions")
        target = replace(target, model=await client.first_model(target))
        asking = Rounds(stack, client, target, prompt_tokens, seed)
        print(f"{'round':>8} {'pulled':>9} {'computed':>9} ms TTFT of {prompt_tokens} tokens {'ratio':>6}")
        for number in range(rounds):
            results.append(await asking.run())
            print(_row(str(number + 1), results[-1:]), flush=True)
    return results


def ratio(rounds: Sequence[Round]) -> float:
    """Median pulled TTFT ÷ median computed TTFT."""
    return statistics.median(r.pulled_s for r in rounds) / statistics.median(r.computed_s for r in rounds)


def _row(name: str, rounds: Sequence[Round]) -> str:
    pulled, computed = (
        1000 * statistics.median([r.pulled_s for r in rounds]),
        1000 * statistics.median([r.computed_s for r in rounds]),
    )
    return f"{name:>8} {pulled:9.1f} {computed:9.1f} {'':>22} {ratio(rounds):10.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: %(default)s")
    asked = parser.parse_args()
    try:
        with running_stack(["--workers", "2"], VARIABLES) as stack:
            rounds = uvloop.run(measure(stack, asked.prompt_tokens, asked.rounds, asked.seed))
    except MeshError as error:
        raise SystemExit(f"bench.pull_ttft: {error.message}") from None
    print(_row("median", rounds))
    if ratio(rounds) > BAR:
        raise SystemExit(f"bench.pull_ttft: the bar is {BAR} × the computed TTFT")


if __name__ == "__main__":
    main()
