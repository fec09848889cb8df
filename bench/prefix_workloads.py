"""Seeded workloads of token ids: prompts that share long prefixes, prompts that share nothing, and mixed traffic.

    shared      | prefix 3 ……… 2,000 tokens | own suffix |     every prefix is asked for at least min_per_prefix times
    unshared    | ……… all its own, as long ………………… |
    mixed       | chat | chat | long prompt ……… | chat |        short prompts that decode, now and then a long one

Token ids, so that no tokenizer is part of what is measured. The same shape and seed give the same requests everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.prompts import PromptRequest, TokenIds

TOKEN_IDS = range(1000, 20_000)
"""Ordinary tokens of any vocabulary."""


@dataclass(frozen=True, slots=True)
class PrefixShape:
    """Lengths in tokens; a range is drawn from evenly, both ends included."""

    prefixes: int
    requests: int
    prefix_tokens: int = 2000
    suffix_tokens: tuple[int, int] = (16, 64)
    output_tokens: tuple[int, int] = (32, 64)
    min_per_prefix: int = 20
    zipf_exponent: float = 0.0
    """Beyond the least, the k-th prefix is asked for 1/k^exponent as often as the first; 0: all alike."""

    def __post_init__(self) -> None:
        if self.requests < self.prefixes * self.min_per_prefix:
            raise ValueError(
                f"requests={self.requests}: fewer than {self.prefixes} prefixes × min_per_prefix={self.min_per_prefix}"
            )

    @property
    def shared_tokens(self) -> int:
        """KV that all prefixes want together."""
        return self.prefixes * self.prefix_tokens


def shared_prefixes(shape: PrefixShape, seed: int) -> list[PromptRequest]:
    """Requests in random order, each one of the prefixes and a suffix of its own."""
    rng = random.Random(f"shared prefixes {seed}")
    prefixes = [_tokens(rng, shape.prefix_tokens) for _ in range(shape.prefixes)]
    popularity = [1 / rank**shape.zipf_exponent for rank in range(1, shape.prefixes + 1)]
    asked = [number for number in range(shape.prefixes) for _ in range(shape.min_per_prefix)]
    asked += rng.choices(range(shape.prefixes), popularity, k=shape.requests - len(asked))
    rng.shuffle(asked)
    return [
        PromptRequest(
            TokenIds((*prefixes[number], *_tokens(rng, rng.randint(*shape.suffix_tokens)))),
            rng.randint(*shape.output_tokens),
        )
        for number in asked
    ]


def unshared(shape: PrefixShape, seed: int) -> list[PromptRequest]:
    """Requests of the same lengths that have no unit in common."""
    rng = random.Random(f"unshared {seed}")
    return [
        PromptRequest(
            TokenIds(_tokens(rng, shape.prefix_tokens + rng.randint(*shape.suffix_tokens))),
            rng.randint(*shape.output_tokens),
        )
        for _ in range(shape.requests)
    ]


@dataclass(frozen=True, slots=True)
class MixedShape:
    """Steady chat, and a long prompt now and then. Lengths in tokens."""

    duration_s: float
    chats_per_s: float
    """Poisson."""
    chat_prompt_tokens: tuple[int, int] = (64, 192)
    chat_output_tokens: tuple[int, int] = (96, 160)
    long_every_s: float = 3.0
    """0: none; the undisturbed run. The first comes after half of it."""
    long_prompt_tokens: int = 4000
    long_output_tokens: tuple[int, int] = (32, 64)


def mixed_traffic(shape: MixedShape, seed: int) -> list[PromptRequest]:
    """Requests with their times, in order. The chats are the same with long prompts and without."""
    chats = list(_chats(shape, random.Random(f"mixed chats {seed}")))
    longs = list(_longs(shape, random.Random(f"mixed longs {seed}")))
    return sorted(chats + longs, key=lambda request: request.at_s or 0.0)


def is_long(request: PromptRequest, shape: MixedShape) -> bool:
    """Of mixed traffic: one of the long prompts."""
    assert isinstance(request.prompt, TokenIds)
    return len(request.prompt.token_ids) == shape.long_prompt_tokens


def _chats(shape: MixedShape, rng: random.Random) -> Iterator[PromptRequest]:
    at_s = rng.expovariate(shape.chats_per_s)
    while at_s < shape.duration_s:
        prompt = TokenIds(_tokens(rng, rng.randint(*shape.chat_prompt_tokens)))
        yield PromptRequest(prompt, rng.randint(*shape.chat_output_tokens), at_s)
        at_s += rng.expovariate(shape.chats_per_s)


def _longs(shape: MixedShape, rng: random.Random) -> Iterator[PromptRequest]:
    at_s = 0.5 * shape.long_every_s
    while shape.long_every_s and at_s < shape.duration_s:
        prompt = TokenIds(_tokens(rng, shape.long_prompt_tokens))
        yield PromptRequest(prompt, rng.randint(*shape.long_output_tokens), at_s)
        at_s += shape.long_every_s


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(TOKEN_IDS, k=count))
