"""A pool for long prompts on real workers: each prompt goes to the pool of its length, and none is lost with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.mesh.gated_stack import GatedStack, Stream, prompt_and_answer
from tests.mesh.hosts import wait_pools_at_rest
from tests.mesh.stack import Service

LONG_FROM = 128
SHORT = ("text-33", "text-127")
LONG = ("text-128", "text-150")


@pytest.fixture
def stack(smollm2_dir: Path, tmp_path: Path) -> Iterator[GatedStack]:
    pools = [{"WORKER_MAX_PROMPT_TOKENS": str(LONG_FROM - 1)}, {"WORKER_MIN_PROMPT_TOKENS": str(LONG_FROM)}]
    with GatedStack(smollm2_dir, tmp_path, ["both", "both"], pools) as stack:
        yield stack


class Asked:
    """One of the exactness prompts, under a salt of its own."""

    def __init__(self, stack: GatedStack, session: aiohttp.ClientSession, name: str) -> None:
        self.prompt, self.answer = prompt_and_answer(stack.model_dir, name)
        num_tokens = len(self.answer)
        self.stream = Stream(session, stack.url, self.prompt, max_tokens=num_tokens, cache_salt=Stream.salt())

    async def ends_right(self) -> None:
        assert await self.stream.end() == self.answer
        assert self.stream.result.cached_tokens == 0


def prefilled(worker: Service) -> int:
    """Tokens it has prefilled since it started."""
    return int(worker.samples("phasemesh_worker_tokens_total").get('phase="prefill"', 0))


async def test_prompts_go_to_the_pool_of_their_length_as_long_as_it_is_there(
    stack: GatedStack, session: aiohttp.ClientSession
) -> None:
    """The only worker for long prompts is killed (-9) in mid-stream; then they go where short ones go."""
    for_short, for_long = stack.workers
    short, long = ([Asked(stack, session, name) for name in names] for names in (SHORT, LONG))
    await asyncio.gather(*(asked.ends_right() for asked in (*short, *long)))
    assert prefilled(for_short) == sum(len(asked.prompt) for asked in short)
    assert prefilled(for_long) == sum(len(asked.prompt) for asked in long)

    with stack.gate(for_long, "decode", lets_pass=3) as gate:
        running = Asked(stack, session, LONG[0])
        await gate.reached()
        await running.stream.has(1)
        for_long.kill()
    later = Asked(stack, session, LONG[1])
    await asyncio.gather(running.ends_right(), later.ends_right())
    assert prefilled(for_short) > sum(len(asked.prompt) for asked in (*short, running, later)), "and what was published"
    await asyncio.to_thread(wait_pools_at_rest, stack.scheduler, [for_short.name], 30.0)

    for_long.start()
    await stack.at_rest()
    await Asked(stack, session, LONG[0]).ends_right()
    assert prefilled(for_long) == len(running.prompt)
