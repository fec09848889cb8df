"""A mesh whose worker runs no model: every token is known beforehand, so none can be lost, repeated or swapped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from bench.overhead_client import Run, measure
from gpu_worker.simulated_runner import TokenSource
from tests.mesh.client import complete, events
from tests.mesh.conftest import eventually
from tests.mesh.stack import MeshStack

PROMPT = "Once upon a time"
VOCAB, EOS_IDS = 49152, (2,)
"""Of SmolLM2-135M-Instruct."""


@pytest.fixture(scope="module")
def simulated(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MeshStack]:
    environment = {"SIMULATE": "on", "SIMULATED_FIXED_US": "2000", "KV_PAGES": "400"}
    with MeshStack(smollm2_dir, tmp_path_factory.mktemp("simulated"), env=environment) as stack:
        yield stack


def predicted(seed: int, count: int, choice: int = 0) -> list[int]:
    return TokenSource(VOCAB, EOS_IDS).tokens([seed] * count, [choice] * count, range(count))


async def test_every_token_of_concurrent_streams_is_the_predicted_one(
    simulated: MeshStack, session: aiohttp.ClientSession
) -> None:
    lengths = {seed: 20 + seed % 50 for seed in range(1, 33)}
    answers = await asyncio.gather(
        *(complete(session, simulated.url, PROMPT, length, seed=seed) for seed, length in lengths.items())
    )
    for (seed, length), answer in zip(lengths.items(), answers, strict=True):
        assert answer.token_ids == predicted(seed, length)
        assert answer.finish_reason == "length"
    simulated.wait_no_page_in_use()


async def test_the_same_seed_gives_the_same_text_and_another_another(
    simulated: MeshStack, session: aiohttp.ClientSession
) -> None:
    first, again, other = [
        (await complete(session, simulated.url, PROMPT, 30, seed=seed, temperature=1)).text for seed in (5, 5, 6)
    ]
    assert first == again != other


async def test_choices_differ_and_each_is_predicted(simulated: MeshStack, session: aiohttp.ClientSession) -> None:
    tokens: dict[int, list[int]] = {0: [], 1: []}
    wanted = {"n": 2, "seed": 9, "max_tokens": 12, "return_token_ids": True}
    async for event in events(session, simulated.url, PROMPT, **wanted):
        for choice in event["choices"]:
            tokens[choice["index"]] += choice.get("token_ids") or []
    assert tokens == {0: predicted(9, 12, 0), 1: predicted(9, 12, 1)}


async def test_a_client_that_leaves_frees_its_pages(simulated: MeshStack, session: aiohttp.ClientSession) -> None:
    stream = events(session, simulated.url, PROMPT, max_tokens=4000, seed=1)
    for _ in range(3):
        await anext(stream)
    assert simulated.workers[0].metric("phasemesh_worker_sequences") == 1
    await stream.aclose()
    await eventually(
        "the worker has dropped the sequence", lambda: simulated.workers[0].metric("phasemesh_worker_sequences") == 0
    )
    simulated.wait_no_page_in_use()


@pytest.mark.parametrize("vocab_size", [VOCAB, VOCAB - 1])
async def test_the_benchmarks_client_holds_every_token_against_the_prediction(
    simulated: MeshStack, vocab_size: int
) -> None:
    run = Run(
        url=simulated.url,
        model="m",
        vocab_size=vocab_size,
        eos_token_ids=list(EOS_IDS),
        streams=3,
        prompt_words=5,
        output_tokens=20,
        think_s=0.01,
        warm_up_s=0.1,
        measure_s=0.4,
        pids={"redis": os.getpid()},
    )
    result = await measure(run)
    assert result.requests >= 3 and result.events_of_many == 0
    assert result.wrong == (0 if vocab_size == VOCAB else result.requests)
    assert len(result.first_wave_ttft_s) == 3
    assert 0 < result.tokens <= 20 * result.requests
    assert set(result.cpu_s) == {"redis", "client"}


async def test_the_answer_of_a_stop_string_ends_before_it(simulated: MeshStack, session: aiohttp.ClientSession) -> None:
    whole = (await complete(session, simulated.url, PROMPT, 40, seed=11)).text
    stop = whole[len(whole) // 2 :][:6]
    stopped = await complete(session, simulated.url, PROMPT, 4000, seed=11, stop=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index(stop)]
    simulated.wait_no_page_in_use()
