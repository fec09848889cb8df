"""SmolLM2's greedy tokens are the reference's with the prefix from host memory, from disk and from Redis.

In a worker alone, and in the whole mesh, where a worker that was killed (-9) finds what its earlier life left on disk
and in Redis.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from gpu_worker.executor import Executor
from gpu_worker.model_runner import load_runner
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.telemetry import StepTelemetry
from gpu_worker.tiers.open_tiers import lower_stores, open_codec, open_stack
from gpu_worker.tiers.unit_codec import LowerTierDtype
from gpu_worker.transfer.plane import open_plane
from kvstore.prefix_hash import chain, namespace
from observability.metrics import WorkerMetrics
from observability.tracing import NullTracer
from tests.exactness.prompts import PROMPTS
from tests.exactness.reference import Tally, check, committed, encode_prompt
from tests.mesh.client import Completion, complete
from tests.mesh.stack import MeshStack, Service
from tests.redis_fixture import redis_url
from tests.worker.plans import ROOT, chunk, grant, greedy, plan, release
from tests.worker.test_executor import Client, tokens_of
from wire.config import CellConfig, ModelConfig, TierConfig, load
from wire.ids import Epoch, PageId, PullId, WorkerId
from wire.model_path import cache_root
from wire.plan import LOWER_TIERS, KvPull, Tier

__all__ = ["redis_url"]

PAGE_SIZE = 64
NUM_PAGES = 32
WORKER = WorkerId("w1")
NAMES = ("text-200", "text-500")
FLUSH_TIMEOUT_S = 30.0
HOST_UNITS = {Tier.HOST: 128, Tier.DISK: 8, Tier.REDIS: 8}
"""What the host holds, when units are to come from each tier: all of it, or too little."""
LEAVING_UNITS = 64


@pytest.fixture(scope="module")
def runner(smollm2_dir: Path) -> PagedModelRunner:
    return load_runner(
        smollm2_dir,
        device="cpu",
        weight_dtype="auto",
        attention_backend="auto",
        page_size=PAGE_SIZE,
        num_pages=NUM_PAGES,
        kv_memory_bytes=0,
        max_model_len=None,
        name="smollm2",
        kernels_dir=cache_root(load(ModelConfig, os.environ)),
    )


class Session:
    """One client of one worker; every prompt gets pages 0, 1, …, so it evicts the one before."""

    def __init__(self, executor: Executor) -> None:
        self.client = Client(executor)
        self._number = 0

    async def run(self, prompt: list[int], start_pos: int, output_tokens: int) -> list[int]:
        """Greedy output; [0, start_pos) lies in the pages already."""
        self._number += 1
        pages = grant(range(-(-(len(prompt) + output_tokens) // PAGE_SIZE)), len(prompt) + output_tokens)
        sampling = greedy(output_tokens)
        rest = chunk(self._number, start_pos, len(prompt) - start_pos, tokens=prompt, pages=pages, sampling=sampling)
        reports = await self.client.run(plan(2 * self._number, chunks=[rest], max_steps=output_tokens))
        ends = plan(2 * self._number + 1, releases=[release(self._number)], max_steps=0)
        await self.client.run(ends)
        return tokens_of(reports, self._number)

    async def pull(self, prompt: list[int], num_units: int) -> str:
        """The prompt's first units into the pages; the transport."""
        self._number += 1
        ordered = plan(2 * self._number, max_steps=0)
        pages = [PageId(page) for page in range(-(-num_units * 16 // PAGE_SIZE))]
        hashes = chain(ROOT, prompt)[:num_units]
        ordered.kv_pulls.append(KvPull(PullId(1), WORKER, "", Epoch(1), hashes, pages, lease_ms=20_000))
        await self.client.run(ordered)
        report = await self.client.pulled()
        assert (report.num_units, report.failure) == (num_units, None)
        return report.transport


@asynccontextmanager
async def worker(
    runner: PagedModelRunner, tier: Tier, config: TierConfig, cell: CellConfig
) -> AsyncIterator[tuple[Session, Callable[[], bool]]]:
    """Its one session, and what waits until the tiers below the host have everything."""
    metrics, units = WorkerMetrics(), namespace(runner.card)
    assert runner.kv is not None
    codec = open_codec(runner.kv.format, units, LowerTierDtype.AUTO)
    lower = lower_stores(config, cell, codec)
    spare = LEAVING_UNITS if lower else 0
    slots = HOST_UNITS[tier] + spare
    with (
        open_stack(
            runner.kv, codec, lower, num_slots=slots, spare_slots=spare, pinned=False, metrics=metrics.tiers
        ) as tiers,
        open_plane(runner.kv, worker_id=WORKER, namespace=units, tiers=tiers) as plane,
    ):
        telemetry = StepTelemetry(metrics, NullTracer())
        async with Executor(runner, telemetry, epoch=Epoch(1), puller=plane.puller, tiers=tiers) as executor:
            session = Session(executor)
            await session.client.open()
            yield session, lambda: tiers.flush(FLUSH_TIMEOUT_S)


@pytest.mark.parametrize("tier", LOWER_TIERS)
async def test_the_prefix_comes_back_from_below(
    tier: Tier, runner: PagedModelRunner, smollm2_dir: Path, tmp_path: Path, redis_url: str
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    cases = {p.name: (encode_prompt(p, tokenizer), p.output_tokens) for p in PROMPTS if p.name in NAMES}
    other = cases[NAMES[0]][0][::-1]
    config = TierConfig(
        disk_mb=128 if tier is Tier.DISK else 0, disk_dir=str(tmp_path), redis_mb=128 if tier is Tier.REDIS else 0
    )
    cell = CellConfig(cell=f"exact-{tier}", redis_url=redis_url)
    references, tally = committed(), Tally()
    async with worker(runner, tier, config, cell) as (session, flushed):
        for name, (prompt, output_tokens) in cases.items():
            for tokens in (prompt, other + prompt[-300:], other):  # the last evicts the second from host memory too
                await session.run(tokens, 0, 1)
                assert await asyncio.to_thread(flushed)
            num_units = (len(prompt) - 1) // 16 // 2
            assert await session.pull(prompt, num_units) == tier
            output = await session.run(prompt, num_units * 16, output_tokens)
            check(name, prompt, output, references[name], None, tally)


STACKS = {
    Tier.HOST: {"HOST_KV_MB": "128"},
    Tier.DISK: {"HOST_KV_MB": "48", "DISK_KV_MB": "256"},
    Tier.REDIS: {"HOST_KV_MB": "48", "REDIS_KV_MB": "256"},
}
"""A prompt of 500 tokens has 23 MB of KV."""


def wait_units(worker: Service, tier: Tier, at_least: int) -> None:
    deadline_s = time.monotonic() + FLUSH_TIMEOUT_S
    while (units := worker.metric("phasemesh_worker_tier_units", f'tier="{tier}"')) < at_least:
        assert time.monotonic() < deadline_s, f"{units} units in {tier}"
        time.sleep(0.05)


@pytest.mark.parametrize("tier", LOWER_TIERS)
async def test_the_mesh_brings_back_what_its_pages_lost(tier: Tier, smollm2_dir: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    cases = {p.name: (encode_prompt(p, tokenizer), p.output_tokens) for p in PROMPTS}
    prompt, output_tokens = cases["text-500"]
    # Enough to drive it out of the pages and, of 68 slots, out of the host; each brings fewer units than may be leaving
    # the host at once.
    rng = random.Random(0)
    others = [[rng.randrange(1000, 40_000) for _ in range(200)] for _ in range(4 if tier is Tier.HOST else 14)]
    env = {"KV_PAGE_SIZE": "16", "KV_PAGES": "48", **STACKS[tier]}
    if tier is Tier.DISK:
        env["DISK_KV_DIR"] = str(tmp_path / "kv")
    label = f'tier="{tier}"'
    with MeshStack(smollm2_dir, tmp_path, env=env) as stack:
        worker = stack.workers[0]
        async with aiohttp.ClientSession() as session:

            async def ask() -> Completion:
                answer = await complete(session, stack.url, prompt, output_tokens)
                assert answer.error is None
                check("text-500", prompt, answer.token_ids, committed()["text-500"], None, Tally())
                return answer

            assert (await ask()).cached_tokens == 0
            for other in others:
                await complete(session, stack.url, other, 1)
            if tier is not Tier.HOST:
                await asyncio.to_thread(wait_units, worker, tier, 31)
                worker.kill()
                worker.start()
                worker.wait_healthy()
                await asyncio.to_thread(wait_units, worker, tier, 31)
                await asyncio.to_thread(stack.gateway.wait_healthy)  # it knows of the worker again
            answer = await ask()
            assert answer.cached_tokens >= 16 * 16
            assert worker.metric("phasemesh_worker_tier_reads_total", f'result="hit",{label}') >= 16
        stack.wait_no_page_in_use()
