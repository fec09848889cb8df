"""Workers that pull from one another, each with a scheduler's session of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvstore.prefix_hash import chain
from tests.worker.fake_runner import FakeRunner, reference_output
from tests.worker.fake_worker import FakeWorker, running_worker
from tests.worker.plans import ROOT, chunk, grant, plan
from tests.worker.test_executor import Client, tokens_of
from wire.ids import Epoch, PageId, PullId, UnitHash, WorkerId
from wire.plan import KvPull, PullReport, StepPlan

LEASE_MS = 10_000
"""Longer than any test that does not wait for its end."""
PROMPT = list(range(1, 141))
"""Eight units and a piece of the ninth."""
HASHES = chain(ROOT, PROMPT)


class Peer:
    """A worker, its session, and its pages counted from 0."""

    def __init__(self, worker: FakeWorker, client: Client) -> None:
        self.worker = worker
        self.client = client
        self._next_id = 0

    def next_id(self) -> int:
        self._next_id += 1
        return self._next_id

    @property
    def page_size(self) -> int:
        return self.worker.runner.page_size

    def pages_for(self, num_tokens: int, first: int = 0) -> list[int]:
        return list(range(first, first + -(-num_tokens // self.page_size)))

    async def compute(self, tokens: Sequence[int] = PROMPT, *, seq: int = 1, first_page: int = 0) -> None:
        """Prefill `tokens` into pages from first_page on."""
        pages = self.pages_for(len(tokens), first_page)
        whole = chunk(seq, 0, len(tokens), tokens=tokens, pages=grant(pages, len(tokens)))
        await self.client.run(plan(self.next_id(), chunks=[whole]))

    def pull_from(
        self,
        source: Peer,
        hashes: Sequence[UnitHash] = HASHES,
        *,
        first_page: int = 0,
        lease_ms: int = LEASE_MS,
    ) -> KvPull:
        pages = self.pages_for(len(hashes) * 16, first_page)
        return pull_of(source.worker, hashes, pages, pull_id=self.next_id(), lease_ms=lease_ms)

    async def pull(self, *pulls: KvPull) -> list[PullReport]:
        """Order pulls and wait for their last reports, in the order of the pulls."""
        await self.client.run(self.plan_of(*pulls))
        reports = {report.pull_id: report for report in [await self.client.pulled() for _ in pulls]}
        return [reports[pull.pull_id] for pull in pulls]

    def plan_of(self, *pulls: KvPull, **more: Any) -> StepPlan:
        return plan(self.next_id(), pulls=pulls, max_steps=0, **more)

    async def continue_from(self, num_tokens: int, *, first_page: int = 0) -> list[int]:
        """Output of PROMPT when its first tokens are taken from pages that already hold them."""
        seq = 1000 + self.next_id()
        pages = self.pages_for(len(PROMPT) + 16, first_page)
        rest = chunk(seq, num_tokens, len(PROMPT) - num_tokens, tokens=PROMPT, pages=grant(pages, len(PROMPT) + 16))
        return tokens_of(await self.client.run(plan(self.next_id(), chunks=[rest], max_steps=8)), seq)

    def resident(self) -> set[UnitHash]:
        return {h for page in self.worker.executor.residency.pages() for h in page.unit_hashes}


EXPECTED = reference_output(PROMPT, 8)
"""What continue_from gives when the pages hold what they should."""


def pull_of(
    source: FakeWorker, hashes: Sequence[UnitHash], pages: Sequence[int], *, pull_id: int, lease_ms: int = LEASE_MS
) -> KvPull:
    return KvPull(
        PullId(pull_id),
        source.worker_id,
        source.address,
        source.executor.epoch,
        list(hashes),
        [PageId(page) for page in pages],
        lease_ms,
    )


def pull_from_address(
    address: str, *, pages: Sequence[int], lease_ms: int, pull_id: int = 1, epoch: int = 100
) -> KvPull:
    """From a source that is no worker of this process."""
    page_ids = [PageId(page) for page in pages]
    return KvPull(PullId(pull_id), WorkerId("elsewhere"), address, Epoch(epoch), HASHES, page_ids, lease_ms)


@asynccontextmanager
async def peer(runner: FakeRunner | None = None, **options: Any) -> AsyncIterator[Peer]:
    async with running_worker(runner, **options) as worker:
        client = Client(worker.executor)
        await client.open()
        yield Peer(worker, client)


@asynccontextmanager
async def two_peers(
    source_page: int = 16, target_page: int = 16, *, source: dict[str, Any] | None = None, **target: Any
) -> AsyncIterator[tuple[Peer, Peer]]:
    """A source, whose options are `source`, and a target."""
    async with (
        peer(FakeRunner(page_size=source_page), worker_id="source", **(source or {})) as giver,
        peer(FakeRunner(page_size=target_page), worker_id="target", **target) as taker,
    ):
        yield giver, taker
