"""Tiny random checkpoints of every family through engine, executor and paged model: transformers' greedy tokens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path

import pytest

from tests.exactness.reference import MAX_DIFFERENT_SHARE, Reference, Tally, TransformersModel, check, check_logprobs
from tests.mesh.in_process import Answer, InProcessMesh
from tests.model.checkpoints import FAMILIES
from tests.model.conftest import checkpoint  # noqa: F401  # a fixture
from tests.model.paged import open_runner
from wire.config import BatchingConfig
from wire.ids import WorkerId
from wire.sampling import SamplingParams

OUTPUT_TOKENS = 16
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 100, 150, 200)
BUDGETS = (7, 64, 2048)


@dataclass
class Case:
    prompt: list[int]
    reference: Reference


class Family:
    def __init__(self, name: str, directory: Path) -> None:
        rng = random.Random(name)
        self.directory = directory
        self.model = TransformersModel(directory)
        prompts = [[rng.randrange(3, 320) for _ in range(length)] for length in LENGTHS]
        self.cases = [Case(p, self.model.reference(p, OUTPUT_TOKENS)) for p in prompts]
        self.tally = Tally()

    @asynccontextmanager
    async def mesh(
        self, *, page_size: int = 16, num_pages: int = 128, workers: int = 1, budget: int = 64
    ) -> AsyncIterator[InProcessMesh]:
        runners = [open_runner(self.directory, page_size=page_size, num_pages=num_pages) for _ in range(workers)]
        config = BatchingConfig(step_token_budget=budget, itl_target_ms=inf, kv_watermark=0.0)
        async with InProcessMesh(runners, config) as mesh:
            yield mesh
            stats = mesh.engine.stats()
            assert all(w.pages.in_use == 0 for w in stats.workers), "pages leaked"

    async def ask(self, mesh: InProcessMesh, case: Case) -> Answer:
        answer = await mesh.ask(case.prompt, SamplingParams(OUTPUT_TOKENS, temperature=0.0, logprobs=0))
        assert answer.terminal is not None and answer.terminal.error_code is None, answer.terminal
        name = f"prompt of {len(case.prompt)}"
        check(name, case.prompt, answer.outputs[0], case.reference, self.model, self.tally)
        check_logprobs(name, answer.outputs[0], answer.logprobs[0], case.reference)
        return answer

    async def ask_together(self, mesh: InProcessMesh, number: int = 16) -> list[Answer]:
        chosen = (self.cases * number)[:number]
        return await asyncio.gather(*(self.ask(mesh, case) for case in chosen))


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Family:  # noqa: F811
    return Family(request.param, checkpoint(request.param))


async def test_greedy_tokens_are_transformers_however_the_work_is_cut(
    family: Family, report_figure: Callable[[str], None]
) -> None:
    for page_size in (16, 64):
        for budget in BUDGETS:
            async with family.mesh(page_size=page_size, budget=budget) as mesh:
                for case in family.cases:  # alone and cold
                    await family.ask(mesh, case)
                for case in family.cases:  # a full-prompt hit
                    hit = await family.ask(mesh, case)
                    assert hit.terminal is not None
                    whole_units = len(case.prompt) // 16 * 16
                    assert hit.terminal.stats.cached_tokens == min(len(case.prompt) - 1, whole_units)
            async with family.mesh(page_size=page_size, budget=budget) as mesh:
                await family.ask_together(mesh)
    await hit_inside_a_page(family)
    await after_preemption(family)
    await two_workers_one_lost(family)
    report_figure(str(family.tally))
    assert family.tally.share <= MAX_DIFFERENT_SHARE


async def hit_inside_a_page(family: Family) -> None:
    case = family.cases[-1]
    async with family.mesh(page_size=64, budget=2048) as mesh:
        await mesh.ask(case.prompt[:100], SamplingParams(1, temperature=0.0))
        hit = await family.ask(mesh, case)
        assert hit.terminal is not None and hit.terminal.stats.cached_tokens == 96


async def after_preemption(family: Family) -> None:
    async with family.mesh(page_size=16, num_pages=15, budget=64) as mesh:
        await family.ask_together(mesh, 20)
        assert mesh.engine.stats().preemptions > 0


async def two_workers_one_lost(family: Family) -> None:
    async with family.mesh(workers=2) as mesh:
        await family.ask_together(mesh)
        running = asyncio.create_task(family.ask_together(mesh))
        await mesh.until_running(4)
        mesh.disconnect(WorkerId("w0"))
        await running
        await mesh.connect(WorkerId("w0"))
        await family.ask_together(mesh)
