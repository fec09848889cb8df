"""Benchmarks that ask one server in rounds and print a row of each, then one of their medians."""

from __future__ import annotations

import argparse
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import uvloop

from bench.openai_stream import StreamClient, Target, open_client, parse_target
from bench.prompts import PromptRequest, TokenIds
from wire.errors import MeshError

TIMEOUT_S = 300.0
TOKEN_IDS = range(1000, 20_000)
"""Ordinary tokens of any vocabulary."""
WARM_UP = 32, 4
"""Prompt and output tokens of the request before the first round."""

R = TypeVar("R")


def random_prompt(rng: random.Random, num_tokens: int, max_tokens: int) -> PromptRequest:
    return PromptRequest(TokenIds([rng.choice(TOKEN_IDS) for _ in range(num_tokens)]), max_tokens)


@dataclass(frozen=True, slots=True)
class Rounds(Generic[R]):
    """A benchmark: `python -m <name>`. run raises BenchFailed when a round does not show what it should."""

    name: str
    head: str
    run: Callable[[StreamClient, Target, random.Random], Awaitable[R]]
    row: Callable[[str, Sequence[R]], str]
    """A line for one round or several, by a name."""

    def main(self, asked: argparse.Namespace) -> None:
        """With the arguments of server_arguments. Ends the process with a message when something fails."""
        try:
            target = replace(parse_target(asked.url, "--url"), path="/v1/completions", model=asked.model)
            rounds = uvloop.run(self._measure(target, asked.rounds, asked.seed))
        except MeshError as error:
            raise SystemExit(f"{self.name}: {error.message}") from None
        except ExceptionGroup as group:
            raise SystemExit(f"{self.name}: {group.exceptions[0]}") from None
        print(self.row("median", rounds))

    async def _measure(self, target: Target, count: int, seed: int) -> list[R]:
        """One round after the other, each printed as it ends."""
        rng = random.Random(f"{self.name} {seed}")
        rounds: list[R] = []
        async with open_client(timeout_s=TIMEOUT_S) as client:
            named = target if target.model else replace(target, model=await client.first_model(target))
            await client.send(named, random_prompt(rng, *WARM_UP))
            print(self.head)
            for number in range(count):
                rounds.append(await self.run(client, named, rng))
                print(self.row(str(number + 1), rounds[-1:]), flush=True)
        return rounds


def server_arguments(doc: str | None) -> argparse.ArgumentParser:
    """--url, --model, --rounds and --seed; the benchmark adds its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server; default: %(default)s")
    parser.add_argument("--model", default="", help="default: the first the server names")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default: %(default)s")
    return parser
