"""SmolLM2 on several workers that bring one another KV: what a client gets is what one worker alone gives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.exactness.prompts import PROMPTS
from tests.exactness.reference import MAX_DIFFERENT_SHARE, committed, encode_prompt
from tests.exactness.test_smollm2_mesh import Suite, at_once
from tests.mesh.gated_stack import GatedStack

pytestmark = pytest.mark.timeout(1500)

NAME = "text-640"
BUDGET = 48
"""Fourteen chunks: several pulls overlap with them."""
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 2, "max_tokens": 16},
    "choices": {"n": 2, "seed": 7, "temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 1},
    "stopped": {"seed": 9, "temperature": 0.7, "stop": [" the", "e "], "max_tokens": 64},
}


@pytest.fixture
def prompt(smollm2_dir: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    return encode_prompt(next(p for p in PROMPTS if p.name == NAME), tokenizer)


async def choices(url: str, prompt: list[int]) -> dict[str, list[Any]]:
    """Of each request, all that its choices say: one alone, then the others together, none from another's cache."""

    async def ask(session: aiohttp.ClientSession, name: str) -> list[Any]:
        body = {"model": "m", "prompt": prompt, "return_token_ids": True, "cache_salt": name, "max_tokens": 24}
        body |= REQUESTS[name]
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return list((await answer.json())["choices"])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        first, *others = REQUESTS
        answers = [await ask(session, first), *await asyncio.gather(*(ask(session, name) for name in others))]
    return dict(zip(REQUESTS, answers, strict=True))


async def test_disaggregated_choices_are_the_colocated_ones(
    smollm2_dir: Path, tmp_path: Path, prompt: list[int]
) -> None:
    (tmp_path / "one").mkdir()
    with GatedStack(smollm2_dir, tmp_path / "one", ["both"], STEP_TOKEN_BUDGET=BUDGET) as stack:
        colocated = await choices(stack.url, prompt)
    (tmp_path / "two").mkdir()
    with GatedStack(smollm2_dir, tmp_path / "two", ["prefill", "decode"], STEP_TOKEN_BUDGET=BUDGET) as stack:
        assert await choices(stack.url, prompt) == colocated
        assert stack.pulls("shm") >= 4, "one pull, not several beside the chunks"
        await stack.at_rest()
    assert colocated["greedy"][0]["token_ids"] == committed()[NAME].tokens
    assert colocated["stopped"][0]["finish_reason"] == "stop"


@pytest.fixture
def every_prompt(smollm2_dir: Path, report_figure: Callable[[str], None]) -> Iterator[Suite]:
    suite = Suite(smollm2_dir, [p.name for p in PROMPTS])
    yield suite
    report_figure(str(suite.tally))
    assert suite.tally.share <= MAX_DIFFERENT_SHARE


@pytest.mark.full
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("roles", [["prefill", "decode"], ["both", "both"]], ids="-".join)
async def test_every_prompt_twice_on_workers_with_little_room(
    every_prompt: Suite, smollm2_dir: Path, tmp_path: Path, roles: list[str], transport: str
) -> None:
    """Sixteen at once, three to a worker at most: prefixes are pulled from wherever they lie."""
    with GatedStack(smollm2_dir, tmp_path, roles, MAX_RUNNING=3) as stack:
        stack.pull_by(transport)
        await at_once(every_prompt, stack.url, every_prompt.cases)
        await at_once(every_prompt, stack.url, every_prompt.cases[::-1])
        assert stack.pulls(transport) > 0
        await stack.at_rest()
