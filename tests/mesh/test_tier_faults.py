"""Redis killed while its tier holds a prefix, or while units are on their way to it or from it: the same greedy tokens,
every page back, and a tier that takes and gives units again.

    moment | down: one of its units is about to be stored │ there: nothing moves │ up: two units came, more are wanted
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.mesh.gated_stack import GatedStack, Stream, prompt_and_answer
from tests.mesh.unit_index import UnitIndex, tier_hits
from wire.ids import UNIT_TOKENS, UnitHash
from wire.plan import Tier

PROMPT = "text-100"
CACHED_TOKENS = 96
"""Of the prompt, its full units."""
ROOM = {"KV_PAGES": 10, "HOST_KV_MB": 9, "REDIS_KV_MB": 256}
"""The prompt and its answer take 8 of 10 pages. Host memory has 12 slots, 3 of them for units that are leaving it."""
FILLER_TOKENS = 33
"""Three pages, so that no more than three units leave at once."""
MAX_TRIES = 8
"""A worker that missed Redis asks it again after a second, and a pull that failed is not tried again for five."""
full = pytest.mark.full


@pytest.fixture(scope="module")
def stack(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedStack]:
    """One worker, with little room above Redis."""
    with GatedStack(smollm2_dir, tmp_path_factory.mktemp("tiers"), ["both"], **ROOM) as stack:
        yield stack


@dataclass
class Scene:
    """A prompt, under as many salts as wanted."""

    stack: GatedStack
    session: aiohttp.ClientSession
    prompt: list[int]
    answer: list[int]
    index: UnitIndex
    streams: list[Stream] = field(default_factory=list)

    async def units(self, salt: str) -> list[UnitHash]:
        return await self.index.units(self.prompt, salt)

    def ask(self, salt: str) -> Stream:
        stream = Stream(self.session, self.stack.url, self.prompt, max_tokens=len(self.answer), cache_salt=salt)
        self.streams.append(stream)
        return stream

    async def cached_tokens(self, salt: str) -> int:
        """Ask, and check the answer; how much of the prompt was not computed."""
        stream = self.ask(salt)
        assert await stream.end() == self.answer
        return stream.result.cached_tokens

    async def comes_back(self, salt: str) -> bool:
        """Push it down and ask: whether all of it came from Redis."""
        await self.push_down(salt)
        before = self.hits
        return await self.cached_tokens(salt) == CACHED_TOKENS and self.hits == before + CACHED_TOKENS // UNIT_TOKENS

    async def push_down(self, salt: str) -> None:
        """Until its units are in Redis alone."""
        await self.index.push_down(await self.units(salt), Tier.REDIS)

    @property
    def hits(self) -> int:
        """Units that Redis gave the worker."""
        return tier_hits(self.stack.workers[0], Tier.REDIS)

    async def works(self) -> None:
        """Sooner or later what is stored now comes back."""
        for _ in range(MAX_TRIES):
            salt = Stream.salt()
            assert await self.cached_tokens(salt) == 0
            if await self.comes_back(salt):
                return
        raise AssertionError("nothing comes back from Redis any more")


@asynccontextmanager
async def tiered(stack: GatedStack, session: aiohttp.ClientSession) -> AsyncIterator[Scene]:
    """In the end all pages are back."""
    prompt, answer = prompt_and_answer(stack.model_dir, PROMPT)
    scene = Scene(stack, session, prompt, answer, UnitIndex(stack, session, filler_tokens=FILLER_TOKENS))
    try:
        yield scene
        await stack.at_rest()
    finally:
        for stream in scene.streams:
            await stream.leave()


DAILY = {("up", "lost")}
CASES = [
    pytest.param(moment, data == "kept", id=f"{moment}-{data}", marks=() if (moment, data) in DAILY else full)
    for moment in ("down", "there", "up")
    for data in ("kept", "lost")
]


@pytest.mark.parametrize(("moment", "keeps_data"), CASES)
async def test_redis_killed_around_its_tier(
    stack: GatedStack, session: aiohttp.ClientSession, moment: str, keeps_data: bool
) -> None:
    worker = stack.workers[0]
    async with tiered(stack, session) as scene:
        salt = Stream.salt()
        assert await scene.cached_tokens(salt) == 0
        asked: Stream | None = None
        if moment == "down":
            third = (await scene.units(salt))[2]
            with stack.gate(worker, f"redis-{third.hex()}") as gate:
                await scene.index.fill_until(lambda: gate.is_reached)
                stack.kill_redis(keeps_data=keeps_data)
        elif moment == "there":
            await scene.push_down(salt)
            stack.kill_redis(keeps_data=keeps_data)
        else:
            await scene.push_down(salt)
            with stack.gate(worker, "layer-14", lets_pass=2) as gate:
                asked = scene.ask(salt)
                await gate.reached()
                stack.kill_redis(keeps_data=keeps_data)
        await stack.start_redis()
        if asked is not None:
            assert await asked.end() == scene.answer
            assert asked.result.cached_tokens < CACHED_TOKENS, "Redis was asked for a unit while it was away"
        await stack.at_rest()
        await scene.cached_tokens(salt)  # whatever is left of it: the answer is right
        await scene.works()
        if keeps_data:
            assert await scene.comes_back(salt)
