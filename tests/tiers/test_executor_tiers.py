"""A worker whose pages are given to others while their KV goes down, and comes back by pulls from itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis import Redis

from gpu_worker.step_batch import StepBatch
from gpu_worker.tiers.open_tiers import OpenStore
from kvstore.prefix_hash import chain
from tests.tiers.stacks import TIMEOUT_S, Opened, disk_below, open_opened, redis_below
from tests.tiers.units import a_cell
from tests.worker.fake_runner import FakeRunner, reference_output
from tests.worker.fake_worker import FakeWorker, running_worker
from tests.worker.plans import ROOT, chunk, grant, greedy, plan, release
from tests.worker.test_executor import Client, tokens_of
from wire.ids import PageId, PullId, UnitHash, WorkerId
from wire.plan import KvPull, PullReport, StepPlan, Tier, TierUnits

PROMPT = list(range(100, 180))
HASHES = chain(ROOT, PROMPT)
OTHER = list(range(300, 380))


class Below:
    """Worker, client and tiers; what the scheduler would believe of the tiers."""

    def __init__(self, worker: FakeWorker, opened: Opened) -> None:
        self.worker = worker
        self.opened = opened
        self.client = Client(worker.executor)
        self._plan_id = 0

    def _plan(self, **parts: object) -> StepPlan:
        self._plan_id += 1
        return plan(self._plan_id, **parts)  # type: ignore[arg-type]

    async def compute(self, seq: int, tokens: list[int], pages: list[int]) -> list[int]:
        """A whole prompt and the token after it, in these pages; the sequence is released."""
        reports = await self.client.run(self.whole_prompt(seq, tokens, pages))
        await self.client.run(self._plan(releases=[release(seq)], max_steps=0))
        return tokens_of(reports, seq)

    def whole_prompt(self, seq: int, tokens: list[int], pages: list[int]) -> StepPlan:
        slots = len(pages) * self.worker.runner.page_size
        return self._plan(chunks=[chunk(seq, 0, len(tokens), tokens=tokens, pages=grant(pages, slots))])

    async def pull(self, hashes: list[UnitHash], pages: list[int], *, source: FakeWorker | None = None) -> PullReport:
        source = source or self.worker
        pull = KvPull(
            PullId(self._plan_id + 1),
            source.worker_id,
            source.address,
            source.executor.epoch,
            hashes,
            [PageId(page) for page in pages],
            lease_ms=5000,
        )
        ordered = self._plan(max_steps=0)
        ordered.kv_pulls.append(pull)
        await self.client.run(ordered)
        return await self.client.pulled()

    async def continue_from(self, seq: int, start_pos: int, pages: list[int], num_tokens: int) -> list[int]:
        """The prompt's last part computed on top of what lies in the pages, then num_tokens of output."""
        page_size = self.worker.runner.page_size
        rest = chunk(
            seq,
            start_pos,
            len(PROMPT) - start_pos,
            tokens=PROMPT,
            pages=grant(pages, len(pages) * page_size),
            sampling=greedy(num_tokens, ignore_eos=True),
        )
        return tokens_of(await self.client.run(self._plan(chunks=[rest], max_steps=num_tokens)), seq)

    async def hear(self) -> dict[Tier, set[UnitHash]]:
        """What a new session is told of the tiers."""
        self.client = Client(self.worker.executor)
        return {units.tier: set(units.stored) for units in (await self.client.open()).tiers}


@asynccontextmanager
async def opened_worker(
    lower: Mapping[Tier, OpenStore] | None = None, *, host_units: int = 64, page_size: int = 16, worker_id: str = "w1"
) -> AsyncIterator[Below]:
    runner = FakeRunner(page_size=page_size)
    with open_opened(lower, host_units=host_units, runner=runner) as opened:
        async with running_worker(runner, tiers=opened.stack, worker_id=worker_id) as worker:
            below = Below(worker, opened)
            await below.hear()
            yield below


LOWEST = pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK, Tier.REDIS])


def lower_of(tier: Tier, directory: Path, redis_url: str) -> dict[Tier, OpenStore]:
    match tier:
        case Tier.DISK:
            return {tier: disk_below(directory)}
        case Tier.REDIS:
            return {tier: redis_below(redis_url, a_cell())}
        case _:
            return {}


@LOWEST
@pytest.mark.parametrize("page_size", [16, 32])
async def test_an_evicted_prefix_comes_back_and_gives_the_same_tokens(
    tier: Tier, page_size: int, tmp_path: Path, redis_url: str
) -> None:
    """A host of 4 units keeps none of the first prompt once the second and the third are evicted too."""
    host_units = 64 if tier is Tier.HOST else 4
    pages = list(range(1, 80 // page_size + 2))
    async with opened_worker(lower_of(tier, tmp_path, redis_url), host_units=host_units, page_size=page_size) as below:
        stack = below.opened.stack
        for seq, tokens in ((1, PROMPT), (2, OTHER), (3, PROMPT[::-1])):
            await below.compute(seq, tokens, pages)
            assert stack.flush(TIMEOUT_S)
        assert stack.find(HASHES[:4]) == [tier] * 4
        targets = [page + 20 for page in pages]
        report = await below.pull(HASHES[:4], targets[: 64 // page_size])
        assert (report.num_units, report.failure, report.transport) == (4, None, tier)
        assert report.num_bytes == 4 * below.worker.unit_bytes
        assert await below.continue_from(4, 64, targets, 6) == reference_output(PROMPT, 6)


async def test_the_scheduler_is_told_what_lies_below(tmp_path: Path) -> None:
    async with opened_worker({Tier.DISK: disk_below(tmp_path)}, host_units=4) as below:
        await below.compute(1, PROMPT, [1, 2, 3, 4, 5])
        await below.compute(2, OTHER, [1, 2, 3, 4, 5])
        assert below.opened.stack.flush(TIMEOUT_S)
        twin: dict[Tier, set[UnitHash]] = {Tier.HOST: set(), Tier.DISK: set()}
        while sum(map(len, twin.values())) < 5:
            units: TierUnits = await below.client.tier_units()
            twin[units.tier] -= set(units.dropped)
            twin[units.tier] |= set(units.stored)
        assert twin[Tier.HOST] | twin[Tier.DISK] == set(HASHES)
        assert await below.hear() == twin


@LOWEST
async def test_a_pull_of_more_than_there_is_brings_the_leading_units(
    tier: Tier, tmp_path: Path, redis_url: str
) -> None:
    host_units = 64 if tier is Tier.HOST else 2
    async with opened_worker(lower_of(tier, tmp_path, redis_url), host_units=host_units) as below:
        await below.compute(1, PROMPT[:48], [1, 2, 3, 4])
        await below.compute(2, OTHER, [1, 2, 3, 4, 5])
        assert below.opened.stack.flush(TIMEOUT_S)
        report = await below.pull(HASHES, [11, 12, 13, 14, 15])
        assert report.num_units == 3
        assert report.failure is not None and "unit 3 of 5" in report.failure
        assert await below.continue_from(3, 48, [11, 12, 13, 16, 17, 18], 4) == reference_output(PROMPT, 4)


@pytest.mark.parametrize("tier", [Tier.DISK, Tier.REDIS])
async def test_a_damaged_unit_ends_the_pull_before_it(tier: Tier, tmp_path: Path, redis_url: str) -> None:
    async with opened_worker(lower_of(tier, tmp_path, redis_url), host_units=2) as below:
        for seq, tokens in ((1, PROMPT), (2, OTHER), (3, PROMPT[::-1])):
            await below.compute(seq, tokens, [1, 2, 3, 4, 5, 6])
            assert below.opened.stack.flush(TIMEOUT_S)
        _damage(tier, tmp_path, redis_url, HASHES[2])
        report = await below.pull(HASHES[:4], [11, 12, 13, 14])
        assert report.num_units == 2
        assert below.opened.count("reads_total", tier, result="damaged") == 1
        again = await below.pull(HASHES[:4], [11, 12, 13, 14])
        assert again.num_units == 2
        assert below.opened.count("reads_total", tier, result="damaged") == 1, "it was dropped"
        assert await below.continue_from(4, 32, [11, 12, 15, 16, 17, 18], 4) == reference_output(PROMPT, 4)


def _damage(tier: Tier, directory: Path, redis_url: str, unit_hash: UnitHash) -> None:
    if tier is Tier.DISK:
        path = next(directory.rglob(f"{unit_hash.hex()}.kv"))
        stored = bytearray(path.read_bytes())
        stored[len(stored) // 2] ^= 0x10
        path.write_bytes(stored)
        return
    with Redis.from_url(redis_url) as redis:
        for key in redis.scan_iter(f"*:{unit_hash.hex()}", count=10_000):  # those of other tests' cells are over
            byte = redis.getrange(key, 400, 400)
            redis.setrange(key, 400, bytes([byte[0] ^ 0x10]))


async def test_another_worker_pulls_from_the_tiers_below(tmp_path: Path) -> None:
    async with opened_worker(host_units=64) as source, opened_worker(worker_id="w2", page_size=32) as target:
        await source.compute(1, PROMPT, [1, 2, 3, 4, 5])
        await source.compute(2, OTHER, [1, 2, 3, 4, 5])
        report = await target.pull(HASHES[:4], [7, 9], source=source.worker)
        assert (report.num_units, report.failure) == (4, None)
        assert await target.continue_from(1, 64, [7, 9, 11], 5) == reference_output(PROMPT, 5)


async def test_another_worker_finds_in_redis_what_this_one_stored(redis_url: str) -> None:
    lower = {Tier.REDIS: redis_below(redis_url, a_cell())}
    async with opened_worker(lower, host_units=2) as one, opened_worker(lower, worker_id="w2") as two:
        for seq, tokens in ((1, PROMPT), (2, OTHER), (3, PROMPT[::-1])):
            await one.compute(seq, tokens, [1, 2, 3, 4, 5])
            assert one.opened.stack.flush(TIMEOUT_S)
        report = await two.pull(HASHES[:4], [11, 12, 13, 14])
        assert (report.num_units, report.transport) == (4, "redis")
        assert await two.continue_from(1, 64, [11, 12, 13, 14, 15, 16], 5) == reference_output(PROMPT, 5)


async def test_a_failed_step_leaves_nothing_below(tmp_path: Path) -> None:
    async with opened_worker({Tier.DISK: disk_below(tmp_path)}, host_units=4) as below:
        await below.compute(1, PROMPT, [1, 2, 3, 4, 5])
        await below.compute(2, OTHER, [1, 2, 3, 4, 5])
        assert below.opened.stack.flush(TIMEOUT_S)

        def fail(batch: StepBatch) -> None:
            raise RuntimeError("device lost")

        below.worker.runner.before_forward = fail
        (failed,) = await below.client.run(below.whole_prompt(3, OTHER, [7, 8, 9, 10, 11]))
        assert failed.failure == "RuntimeError: device lost"
        below.worker.runner.before_forward = lambda batch: None
        assert await below.hear() == {}
        assert (await below.pull(HASHES, [11, 12, 13, 14, 15])).num_units == 0


async def test_a_worker_without_tiers_says_so() -> None:
    async with running_worker() as worker:
        client = Client(worker.executor)
        await client.open()
        ordered = plan(1, max_steps=0)
        ordered.kv_pulls.append(
            KvPull(PullId(1), WorkerId("w1"), worker.address, worker.executor.epoch, HASHES, [PageId(1)], 1000)
        )
        await client.run(ordered)
        report = await client.pulled()
        assert report.num_units == 0 and report.failure is not None
