"""A prefix on its way from one worker to another when something dies: the same greedy tokens, and every page back.

One request holds the prefix on the source, which has room for no other; the next one like it runs on the other worker,
the target, which pulls.

    stage | begin: not asked yet │ layer: half way │ end: all there, nobody knows │ chunk: before the first │ decoding
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from tests.mesh.gated_stack import GatedStack, Stream, prompt_and_answer
from tests.mesh.stack import Service

PROMPT = "text-256"
CACHED_TOKENS = 240
"""Of the prompt's 256: the unit with the last token is computed."""
HOLDER_TOKENS = 80
STAGES = {"begin": "begin", "layer": "layer-14", "end": "end", "chunk": "prefill"}
TRANSPORTS = ("shm", "grpc")
full = pytest.mark.full


@pytest.fixture(scope="module")
def stack(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedStack]:
    """Two workers that do both, one request each."""
    directory = tmp_path_factory.mktemp("pulls")
    with GatedStack(smollm2_dir, directory, ["both", "both"], MAX_RUNNING=1) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: GatedStack) -> list[int]:
    """The holder's tokens when nothing happens: computed on one worker."""
    prompt, answer = prompt_and_answer(stack.model_dir, PROMPT)

    async def ask() -> list[int]:
        async with aiohttp.ClientSession() as session:
            return await Stream(session, stack.url, prompt, max_tokens=HOLDER_TOKENS).end()

    tokens = asyncio.run(ask())
    assert tokens[: len(answer)] == answer
    return tokens


@dataclass
class Scene:
    """A prompt whose KV lies on `source`, by a stream that runs there."""

    stack: GatedStack
    session: aiohttp.ClientSession
    prompt: list[int]
    answer: list[int]
    salt: str
    source: Service
    target: Service
    streams: list[Stream]

    def ask(self) -> Stream:
        """The same again: while the holder runs, there is room on the target only."""
        answer = len(self.answer)
        self.streams.append(Stream(self.session, self.stack.url, self.prompt, max_tokens=answer, cache_salt=self.salt))
        return self.streams[-1]


@asynccontextmanager
async def held(
    stack: GatedStack, session: aiohttp.ClientSession, undisturbed: list[int], transport: str = "shm"
) -> AsyncIterator[Scene]:
    """In the end the holder's tokens are right too, and all pages are back."""
    stack.pull_by(transport)
    prompt, answer = prompt_and_answer(stack.model_dir, PROMPT)
    salt = Stream.salt()
    holder = Stream(session, stack.url, prompt, max_tokens=HOLDER_TOKENS, cache_salt=salt)
    streams = [holder]
    try:
        await holder.has(1)
        source = await stack.worker_that_runs()
        yield Scene(stack, session, prompt, answer, salt, source, stack.other(source), streams)
        assert await holder.end() == undisturbed
        await stack.at_rest()
    finally:
        for stream in streams:
            await stream.leave()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_pulled_prefix_gives_the_tokens_of_a_computed_one(
    stack: GatedStack, session: aiohttp.ClientSession, undisturbed: list[int], transport: str
) -> None:
    async with held(stack, session, undisturbed, transport) as scene:
        before = stack.pulls(transport)
        asked = scene.ask()
        assert await asked.end() == scene.answer
        assert asked.result.cached_tokens == CACHED_TOKENS
        assert stack.pulls(transport) == before + 1


DAILY = {("shm", "begin", "source"), ("shm", "layer", "target"), ("grpc", "end", "source")}
DEATHS = [
    pytest.param(*death, id="-".join(death), marks=() if death in DAILY else full)
    for death in ((t, s, v) for t in TRANSPORTS for s in (*STAGES, "decoding") for v in ("source", "target"))
]


@pytest.mark.parametrize(("transport", "stage", "victim"), DEATHS)
async def test_a_worker_killed_around_a_pull(
    stack: GatedStack, session: aiohttp.ClientSession, undisturbed: list[int], transport: str, stage: str, victim: str
) -> None:
    async with held(stack, session, undisturbed, transport) as scene:
        worker = scene.source if victim == "source" else scene.target
        if stage == "decoding":
            asked = scene.ask()
            await asked.has(3)
            worker.kill()
        else:
            with stack.gate(scene.target, STAGES[stage]) as gate:
                asked = scene.ask()
                await gate.reached()
                worker.kill()
        worker.start()
        assert await asked.end() == scene.answer


@pytest.mark.parametrize(
    ("transport", "keeps_data"),
    [
        pytest.param("shm", True, id="shm-kept", marks=full),
        pytest.param("shm", False, id="shm-lost"),
        pytest.param("grpc", True, id="grpc-kept", marks=full),
        pytest.param("grpc", False, id="grpc-lost", marks=full),
    ],
)
async def test_redis_killed_while_a_prefix_is_pulled(
    stack: GatedStack, session: aiohttp.ClientSession, undisturbed: list[int], transport: str, keeps_data: bool
) -> None:
    async with held(stack, session, undisturbed, transport) as scene:
        with stack.gate(scene.target, STAGES["layer"]) as gate:
            asked = scene.ask()
            await gate.reached()
            stack.kill_redis(keeps_data=keeps_data)
        await stack.start_redis()
        assert await asked.end() == scene.answer


@pytest.mark.parametrize(
    ("transport", "successor"),
    [
        pytest.param("shm", "restart"),
        pytest.param("shm", "standby", marks=full),
        pytest.param("grpc", "restart", marks=full),
        pytest.param("grpc", "standby", marks=full),
    ],
)
async def test_the_scheduler_killed_while_a_prefix_is_pulled(
    stack: GatedStack, session: aiohttp.ClientSession, undisturbed: list[int], transport: str, successor: str
) -> None:
    async with held(stack, session, undisturbed, transport) as scene:
        with stack.gate(scene.target, STAGES["layer"]) as gate:
            asked = scene.ask()
            await gate.reached()
            await stack.kill_scheduler(successor)
        assert await asked.end() == scene.answer
        again = scene.ask()
        assert await again.end() == scene.answer
        assert again.result.cached_tokens >= CACHED_TOKENS
