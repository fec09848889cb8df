"""SmolLM2's choices are the same whichever way the KV of the prompt came: n > 1, seeds, penalties, stop strings and
best log-probabilities, on both endpoints.

    path | at once, the reference │ in chunks │ pulled from another worker │ up from host, disk, Redis │ handed off

Every answer's trace says that it went the way it should.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from observability import names
from tests.exactness.path_requests import NAME, NUM_CHOICES, Answer, Client, Traces, check_answers
from tests.exactness.reference import committed
from tests.mesh.conftest import session
from tests.mesh.gated_stack import GatedStack, Stream
from tests.mesh.unit_index import UnitIndex, tier_hits
from tests.otlp_receiver import OtlpReceiver
from wire.ids import UNIT_TOKENS
from wire.plan import LOWER_TIERS, Tier

__all__ = ["session"]

BUDGET = 32
"""Each prompt in four chunks and more; so a prompt is worth handing off."""
ROOM = {
    Tier.HOST: {"HOST_KV_MB": "60"},
    Tier.DISK: {"HOST_KV_MB": "12", "DISK_KV_MB": "256"},
    Tier.REDIS: {"HOST_KV_MB": "12", "REDIS_KV_MB": "256"},
}
"""Host memory holds 85 units, which is all that moves, or 17; 4 of these are for what is leaving."""
FILLER_TOKENS = 33
"""Of prompts that push others down: three units, no more."""
SHORT_ELSEWHERE = {"WORKER_MIN_PROMPT_TOKENS": "50"}
"""Of a worker that takes no short prompts."""
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(receiver: OtlpReceiver) -> dict[str, str]:
    """Environment of a stack whose traces come to the receiver."""
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_BSP_SCHEDULE_DELAY": "50"}


@pytest.fixture
def traces(receiver: OtlpReceiver) -> Traces:
    return Traces(receiver)


@dataclass(frozen=True)
class Reference:
    answers: dict[str, Answer]
    refusal: dict[str, Any]


def one_worker(model_dir: Path, directory: Path, traced: dict[str, str], tier: Tier) -> GatedStack:
    """It computes a prompt at once, has little more room than the largest request takes, and this tier below."""
    env = traced | {"STEP_TOKEN_BUDGET": "2048", "KV_PAGES": "16", **ROOM[tier]}
    return GatedStack(model_dir, directory, ["both"], **env)


@pytest.fixture(scope="module")
def one(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory, traced: dict[str, str]) -> Iterator[GatedStack]:
    with one_worker(smollm2_dir, tmp_path_factory.mktemp("one"), traced, Tier.HOST) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(one: GatedStack, receiver: OtlpReceiver) -> Reference:
    """Each request alone, with nothing to begin with."""

    async def ask() -> Reference:
        async with aiohttp.ClientSession() as session:
            client = Client(session, one.url, one.model_dir)
            found = Reference(await client.ask(client.salts()), await client.refusal())
        for answer in found.answers.values():
            assert max(await Traces(receiver).chunks(answer)) == len(answer.prompt)
        return found

    found = asyncio.run(ask())
    assert found.answers["greedy"].choices[0]["token_ids"] == committed()[NAME].tokens
    assert found.answers["stopped"].choices[0]["finish_reason"] == "stop"
    assert sum(len(answer.choices) for answer in found.answers.values()) == NUM_CHOICES
    return found


@pytest.fixture(scope="module")
def two(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory, traced: dict[str, str]) -> Iterator[GatedStack]:
    """Two workers, the second of which takes no short prompts."""
    own = [{}, SHORT_ELSEWHERE]
    env = traced | {"STEP_TOKEN_BUDGET": str(BUDGET), "MAX_RUNNING": str(NUM_CHOICES)}
    directory = tmp_path_factory.mktemp("two")
    with GatedStack(smollm2_dir, directory, ["both", "both"], own, **env) as stack:
        yield stack


@asynccontextmanager
async def blocking(
    stack: GatedStack, session: aiohttp.ClientSession, num_sequences: int, *, max_tokens: int
) -> AsyncIterator[None]:
    """The first worker runs so many sequences of a short prompt."""
    short = Stream(session, stack.url, [1000], n=num_sequences, max_tokens=max_tokens)
    try:
        await asyncio.to_thread(stack.workers[0].wait_metric, "phasemesh_worker_sequences", num_sequences)
        yield
    finally:
        await short.leave()


async def test_in_chunks(
    two: GatedStack, session: aiohttp.ClientSession, smollm2_dir: Path, reference: Reference, traces: Traces
) -> None:
    client = Client(session, two.url, smollm2_dir)
    answers = await client.ask_at_once(client.salts())
    check_answers(answers, reference.answers)
    assert await client.refusal() == reference.refusal
    for name, answer in answers.items():
        chunks = await traces.chunks(answer)
        assert max(chunks) <= BUDGET and sum(chunks) >= len(answer.prompt), name
    await two.at_rest()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_pulled_from_another_worker(
    two: GatedStack,
    session: aiohttp.ClientSession,
    smollm2_dir: Path,
    reference: Reference,
    traces: Traces,
    transport: str,
) -> None:
    """The prompts were computed on the first worker while it was alone, and it has no room."""
    client, salts = Client(session, two.url, smollm2_dir), Client.salts()
    two.pull_by(transport)
    source, target = two.workers
    target.kill()
    await client.plant(salts)
    target.start()
    await two.at_rest()
    async with blocking(two, session, NUM_CHOICES, max_tokens=1000):
        answers = await client.ask_at_once(salts)
    check_answers(answers, reference.answers)
    for name, answer in answers.items():
        (transfer,) = await traces.transfers(answer)
        assert transfer[names.TRANSFER_TRANSPORT] == transport, name
        assert transfer[names.TRANSFER_TOKENS] == answer.full_units_tokens, name
        assert (transfer[names.TRANSFER_SOURCE], transfer[names.TRANSFER_TARGET]) == (source.name, target.name), name
    await two.at_rest()


@pytest.mark.parametrize("transport", ["shm", pytest.param("grpc", marks=FULL)])
async def test_prefilled_by_one_worker_and_decoded_by_another(
    smollm2_dir: Path,
    tmp_path: Path,
    session: aiohttp.ClientSession,
    reference: Reference,
    traces: Traces,
    traced: dict[str, str],
    transport: str,
) -> None:
    env = traced | {"STEP_TOKEN_BUDGET": str(BUDGET)}
    with GatedStack(smollm2_dir, tmp_path, ["prefill", "decode"], **env) as stack:
        stack.pull_by(transport)
        client = Client(session, stack.url, smollm2_dir)
        answers = await client.ask(client.salts())
        check_answers(answers, reference.answers)
        assert await client.refusal() == reference.refusal
        for name, answer in answers.items():
            transfers = await traces.transfers(answer)
            assert all(t[names.TRANSFER_HANDOFF] and t[names.TRANSFER_TRANSPORT] == transport for t in transfers), name
            assert len(transfers) > 1, f"{name}: one pull, not several beside the chunks"
            assert sum(t[names.TRANSFER_TOKENS] for t in transfers) >= answer.full_units_tokens, name
        await stack.at_rest()


async def push_down(index: UnitIndex, planted: Mapping[str, Answer], salts: Mapping[str, str], tier: Tier) -> None:
    """Until all prompts lie in this tier, and in none above it."""
    units = [unit for name, answer in planted.items() for unit in await index.units(answer.prompt, salts[name])]
    await index.push_down(units, tier)


@pytest.fixture(params=[Tier.HOST, pytest.param(Tier.DISK, marks=FULL), Tier.REDIS])
def tiered(
    request: pytest.FixtureRequest, one: GatedStack, tmp_path: Path, traced: dict[str, str]
) -> Iterator[tuple[Tier, GatedStack]]:
    tier: Tier = request.param
    if tier is Tier.HOST:
        yield tier, one
        return
    with one_worker(one.model_dir, tmp_path, traced | {"DISK_KV_DIR": str(tmp_path / "kv")}, tier) as stack:
        yield tier, stack


async def test_up_from_a_lower_tier(
    tiered: tuple[Tier, GatedStack], session: aiohttp.ClientSession, reference: Reference, traces: Traces
) -> None:
    """The prompts were computed, and others after them, until none of them is in a faster tier."""
    tier, stack = tiered
    client, salts = Client(session, stack.url, stack.model_dir), Client.salts()
    index = UnitIndex(stack, session, filler_tokens=FILLER_TOKENS)
    planted = await client.plant(salts)
    await push_down(index, planted, salts, tier)
    answers = await client.ask(salts)
    check_answers(answers, reference.answers)
    assert await client.refusal() == reference.refusal
    for name, answer in answers.items():
        (transfer,) = await traces.transfers(answer)
        assert transfer[names.TRANSFER_TRANSPORT] == tier, name
        assert transfer[names.TRANSFER_TOKENS] == answer.full_units_tokens, name
        assert transfer[names.TRANSFER_SOURCE] == transfer[names.TRANSFER_TARGET], name
    await stack.at_rest()


@FULL
@pytest.mark.parametrize("tier", LOWER_TIERS)
async def test_pulled_from_below_another_workers_pages(
    tier: Tier,
    smollm2_dir: Path,
    tmp_path: Path,
    session: aiohttp.ClientSession,
    reference: Reference,
    traces: Traces,
    traced: dict[str, str],
) -> None:
    """The first worker, which has no room, has the prompts below its pages; the second one was started since."""
    own = [{"KV_PAGES": "32", "DISK_KV_DIR": str(tmp_path / "kv"), **ROOM[tier]}, SHORT_ELSEWHERE]
    env = traced | {"STEP_TOKEN_BUDGET": "2048", "MAX_RUNNING": "1"}
    with GatedStack(smollm2_dir, tmp_path, ["both", "both"], own, **env) as stack:
        client, salts = Client(session, stack.url, smollm2_dir), Client.salts()
        source, target = stack.workers
        target.kill()
        planted = await client.plant(salts)
        await push_down(UnitIndex(stack, session, filler_tokens=FILLER_TOKENS), planted, salts, tier)
        target.start()
        await stack.at_rest()
        before = tier_hits(source, tier)
        async with blocking(stack, session, 1, max_tokens=480):
            answers = await client.ask_at_once(salts)
        check_answers(answers, reference.answers)
        for name, answer in answers.items():
            (transfer,) = await traces.transfers(answer)
            assert transfer[names.TRANSFER_TOKENS] == answer.full_units_tokens, name
            assert (transfer[names.TRANSFER_SOURCE], transfer[names.TRANSFER_TARGET]) == (source.name, target.name)
        pulled = sum(answer.full_units_tokens for answer in answers.values()) // UNIT_TOKENS
        assert tier_hits(source, tier) == before + pulled
        await stack.at_rest()
