"""Two `python -m gpu_worker` over a tiny checkpoint: what the second pulls from the first is as its own cache hit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import grpc
import pytest
from redis.asyncio import Redis

from kvstore.prefix_hash import chain
from tests.model.checkpoints import make_checkpoint
from tests.transfer.peers import LEASE_MS
from tests.worker.plans import ROOT, chunk, grant, greedy, plan
from tests.worker.test_process import until, worker_process
from tests.worker.test_session import Stream
from wire import keys
from wire.entries import WorkerEntry
from wire.ids import PageId, PullId, WorkerId
from wire.plan import KvPull, Progress, PullReport, StepPlan, WorkerInfo
from wire.worker_codec import decode_pull_report, decode_report

PROMPT = [3 + (7 * i) % 300 for i in range(140)]
SHARED = 128
SAMPLING = greedy(8, ignore_eos=True, logprobs=5)


@asynccontextmanager
async def attached(redis_url: str, cell: str, name: str) -> AsyncIterator[tuple[Stream, WorkerInfo]]:
    """A session with the worker of that name, once it is registered."""
    async with Redis.from_url(redis_url) as redis:

        async def registered() -> bool:
            return await redis.zscore(keys.workers(cell), name) is not None

        await until(registered)
        raw = cast(dict[bytes, bytes], await redis.hgetall(keys.worker(cell, WorkerId(name))))
    async with grpc.aio.insecure_channel(WorkerEntry.decode(raw).address) as channel:
        stream = Stream(channel)
        hello, _ = await stream.attach(fence=1)
        yield stream, hello


async def run(stream: Stream, step_plan: StepPlan) -> tuple[list[Progress], list[PullReport]]:
    """A plan to its end, and its pulls to theirs."""
    await stream.submit(step_plan)
    progress: list[Progress] = []
    pulled: list[PullReport] = []
    is_done = False
    while not is_done or len(pulled) < len(step_plan.kv_pulls):
        message = await stream.receive()
        if message.WhichOneof("body") == "pull_report":
            report = decode_pull_report(message.pull_report)
            pulled += [report] if report.done else []
        else:
            step = decode_report(message.report)
            progress += step.progress
            is_done = step.plan_done
    return progress, pulled


def outputs(progress: Sequence[Progress]) -> list[tuple[list[int], object]]:
    """Tokens and the exact log-probabilities they were drawn with."""
    return [(p.tokens, p.logprobs) for p in progress]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_pulled_prefix_gives_the_logits_of_the_sources_own_cache_hit(
    transport: str, tmp_path: Path, redis_url: str
) -> None:
    cell = f"transfer-{transport}"
    model = make_checkpoint(tmp_path / "model", "llama_gqa_tied")
    common = {
        "MODEL": str(model),
        "REDIS_URL": redis_url,
        "CELL": cell,
        "KV_PAGES": "64",
        "KV_PAGE_SIZE": "16",
        "WORKER_THREADS": "1",
        "KV_TRANSPORT": "auto" if transport == "shm" else "grpc",
    }
    async with (
        worker_process(**common, WORKER_ID="a"),
        worker_process(**common, WORKER_ID="b"),
        attached(redis_url, cell, "a") as (a, source),
        attached(redis_url, cell, "b") as (b, target),
    ):
        assert source.host_id == target.host_id != ""
        assert source.unit_bytes == 2 * 3 * 16 * 2 * 16 * 4  # K and V, layers, slots, KV heads, head_dim, float32
        whole = chunk(1, 0, len(PROMPT), tokens=PROMPT, pages=grant(range(10), 156), sampling=SAMPLING)
        await run(a, plan(1, chunks=[whole], max_steps=8))
        rest = len(PROMPT) - SHARED
        hit = chunk(2, SHARED, rest, tokens=PROMPT, pages=grant([*range(8), 20, 21], 156), sampling=SAMPLING)
        own, _ = await run(a, plan(2, chunks=[hit], max_steps=8))
        hashes = chain(ROOT, PROMPT)
        pages = [PageId(page) for page in (30, 31, 7, 6, 5, 50, 51, 52)]
        pull = KvPull(PullId(1), WorkerId("a"), source.advertise_address, source.epoch, hashes[:8], pages, LEASE_MS)
        _, [report] = await run(b, plan(1, pulls=[pull], max_steps=0))
        assert (report.num_units, report.failure, report.transport) == (8, None, transport)
        assert report.num_bytes == 8 * source.unit_bytes
        there = chunk(1, SHARED, rest, tokens=PROMPT, pages=grant([*pages, 1, 2], 156), sampling=SAMPLING)
        pulled, _ = await run(b, plan(2, chunks=[there], max_steps=8))
        assert len(own) == 8
        assert outputs(pulled) == outputs(own)
