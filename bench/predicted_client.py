"""Closed-loop clients of simulated workers that compare every token with the one predicted."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from bench.overhead_client import LAST_EVENT, token_ids_by_event
from bench.stack import ModelFacts
from gpu_worker.simulated_runner import TokenSource

TIMEOUT_S = 120.0
RETRY_S = 0.2
BUSY = 429


@dataclass(frozen=True, slots=True)
class PredictedRequest:
    """A prompt, and the seed that its output follows from."""

    seed: int
    prompt: list[int]
    max_tokens: int


@dataclass(slots=True)
class Answers:
    requests: Sequence[PredictedRequest]
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    """What was wrong, one line for each request that did not end as predicted."""


async def ask_all(url: str, facts: ModelFacts, requests: Sequence[PredictedRequest], *, concurrency: int) -> Answers:
    """Each request once, streamed and read to its end; one that is turned away with 429 is sent again."""
    answers = Answers(requests)
    source = TokenSource(facts.vocab_size, facts.eos_token_ids)
    left = iter(requests)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def client() -> None:
            for request in left:  # shared: each goes to one client
                problem = await _ask(http, url, facts.model, request, source)
                answers.tokens += request.max_tokens
                if problem is not None:
                    answers.wrong.append(f"seed {request.seed}: {problem}")

        async with asyncio.TaskGroup() as tasks:
            for _ in range(concurrency):
                tasks.create_task(client())
    return answers


async def _ask(
    http: aiohttp.ClientSession, url: str, model: str, request: PredictedRequest, source: TokenSource
) -> str | None:
    """What was wrong with the answer; None for nothing."""
    body = json.dumps(
        {
            "model": model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "seed": request.seed,
            "stream": True,
            "return_token_ids": True,
        }
    ).encode()
    headers = {"Content-Type": "application/json"}
    try:
        while True:
            async with http.post(f"{url}/v1/completions", data=body, headers=headers) as answer:
                data = await answer.read()
            if answer.status != BUSY:
                break
            await asyncio.sleep(RETRY_S)
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    if answer.status != 200:
        return f"HTTP {answer.status}: {data[:200]!r}"
    count = request.max_tokens
    got = list(itertools.chain.from_iterable(token_ids_by_event(data)))
    if got != source.tokens([request.seed] * count, [0] * count, range(count)):
        return f"{len(got)} tokens of {count}, not those predicted; ends {data[-200:]!r}"
    return None if data.endswith(LAST_EVENT) else f"does not end in [DONE]: {data[-200:]!r}"
