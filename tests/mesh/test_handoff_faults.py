"""A prompt on its way from the worker that prefills it to the one that decodes it when something dies: the same greedy
tokens, and every page back.

    prefill worker | before │ chunk 1 … │ between chunks │ … last: the first token │ parked …
    decode worker  |            │ pull … layer … │ pull …                              │ arrived: its chunk │ decoding
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.mesh.gated_stack import GatedStack, Stream, prompt_and_answer
from tests.mesh.stack import Service

PROMPTS = ("text-300", "text-256", "text-200", "text-150")
"""Three to five chunks each; the first one's last unit is not full, so that a chunk is left for the decode worker."""
TRANSPORTS = ("shm", "grpc")
full = pytest.mark.full


@pytest.fixture(scope="module")
def stack(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatedStack]:
    """One worker that prefills and one that decodes."""
    with GatedStack(smollm2_dir, tmp_path_factory.mktemp("handoffs"), ["prefill", "decode"]) as stack:
        yield stack


@dataclass
class Scene:
    """Requests to be handed off."""

    stack: GatedStack
    session: aiohttp.ClientSession
    salt: str
    streams: list[Stream] = field(default_factory=list)

    @property
    def prefiller(self) -> Service:
        return self.stack.workers[0]

    @property
    def decoder(self) -> Service:
        return self.stack.workers[1]

    def ask(self, name: str = PROMPTS[0]) -> Request:
        prompt, answer = prompt_and_answer(self.stack.model_dir, name)
        stream = Stream(self.session, self.stack.url, prompt, max_tokens=len(answer), cache_salt=self.salt)
        self.streams.append(stream)
        return Request(stream, answer)


@dataclass
class Request:
    stream: Stream
    answer: list[int]

    async def ends_right(self) -> None:
        assert await self.stream.end() == self.answer


@asynccontextmanager
async def handing_off(
    stack: GatedStack, session: aiohttp.ClientSession, transport: str = "shm"
) -> AsyncIterator[Scene]:
    """In the end all pages are back."""
    stack.pull_by(transport)
    scene = Scene(stack, session, Stream.salt())
    try:
        yield scene
        await stack.at_rest()
    finally:
        for stream in scene.streams:
            await stream.leave()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_prompts_handed_off_alone_and_together(
    stack: GatedStack, session: aiohttp.ClientSession, transport: str
) -> None:
    before = stack.pulls(transport)
    async with handing_off(stack, session, transport) as scene:
        await scene.ask().ends_right()
        assert stack.pulls(transport) >= before + 2, "chunks were not pulled while later ones ran"
        await asyncio.gather(*(scene.ask(name).ends_right() for name in PROMPTS))


STAGES = ("before", "between", "layer", "first-token", "arrived", "decoding")
DAILY = {
    ("shm", "between", "prefill"),
    ("shm", "layer", "decode"),
    ("grpc", "first-token", "prefill"),
}
DEATHS = [
    pytest.param(*death, id="-".join(death), marks=() if death in DAILY else full)
    for death in ((t, s, v) for t in TRANSPORTS for s in STAGES for v in ("prefill", "decode"))
]


@asynccontextmanager
async def stage(scene: Scene, name: str) -> AsyncIterator[Request]:
    """A request that has come so far, and goes no farther inside the block."""
    gate = {
        "before": scene.stack.gate(scene.prefiller, "prefill"),
        "between": scene.stack.gate(scene.prefiller, "prefill", lets_pass=2),
        "layer": scene.stack.gate(scene.decoder, "layer-14"),
        "first-token": scene.stack.gate(scene.decoder, "begin"),
        "arrived": scene.stack.gate(scene.decoder, "prefill"),
        "decoding": scene.stack.gate(scene.decoder, "decode", lets_pass=3),
    }[name]
    with gate:
        request = scene.ask()
        await gate.reached()
        if name == "first-token":
            await request.stream.has(1)
        yield request


@pytest.mark.parametrize(("transport", "stage_name", "victim"), DEATHS)
async def test_a_worker_killed_around_a_handoff(
    stack: GatedStack, session: aiohttp.ClientSession, transport: str, stage_name: str, victim: str
) -> None:
    async with handing_off(stack, session, transport) as scene:
        worker = scene.prefiller if victim == "prefill" else scene.decoder
        async with stage(scene, stage_name) as request:
            worker.kill()
        worker.start()
        await request.ends_right()


@pytest.mark.parametrize(
    ("stage_name", "keeps_data"),
    [
        pytest.param("layer", True, id="layer-kept"),
        pytest.param("layer", False, id="layer-lost", marks=full),
        pytest.param("first-token", True, id="first-token-kept", marks=full),
        pytest.param("first-token", False, id="first-token-lost", marks=full),
    ],
)
async def test_redis_killed_during_a_handoff(
    stack: GatedStack, session: aiohttp.ClientSession, stage_name: str, keeps_data: bool
) -> None:
    async with handing_off(stack, session) as scene:
        others = [scene.ask(name) for name in PROMPTS[1:]]
        async with stage(scene, stage_name) as request:
            stack.kill_redis(keeps_data=keeps_data)
        await stack.start_redis()
        await asyncio.gather(*(one.ends_right() for one in (request, *others)))


@pytest.mark.parametrize(
    ("stage_name", "successor"),
    [
        pytest.param("layer", "restart", marks=full),
        pytest.param("layer", "standby"),
        pytest.param("between", "restart", marks=full),
        pytest.param("first-token", "restart", marks=full),
        pytest.param("first-token", "standby", marks=full),
    ],
)
async def test_the_scheduler_killed_during_handoffs(
    stack: GatedStack, session: aiohttp.ClientSession, stage_name: str, successor: str
) -> None:
    async with handing_off(stack, session) as scene:
        others = [scene.ask(name) for name in PROMPTS[1:]]
        async with stage(scene, stage_name) as request:
            await stack.kill_scheduler(successor)
        await asyncio.gather(*(one.ends_right() for one in (request, *others)))
        again = scene.ask()
        await again.ends_right()
        assert again.stream.result.cached_tokens > 0, "what the workers kept is known again"
