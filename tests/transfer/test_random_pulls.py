"""Whatever two workers compute, copy and pull at random, every unit they say is resident lies where they say."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gpu_worker.transfer.transports import GRPC, SHM
from kvstore.prefix_hash import chain
from tests.transfer.peers import Peer, peer, pull_of
from tests.worker.fake_runner import NUM_LAYERS, FakeRunner
from tests.worker.plans import ROOT, chunk, copy, grant, plan, release
from wire.ids import PullId, UnitHash

NUM_PAGES = 24
NUM_ROUNDS = 60


def prompts(rng: random.Random) -> list[list[int]]:
    """Some with a common beginning."""
    stem = [rng.randrange(1, 500) for _ in range(70)]
    return [stem[: rng.choice([0, 16, 48, 64])] + [rng.randrange(1, 500) for _ in range(90)] for _ in range(5)]


class RandomOwner:
    """A scheduler that reuses pages as it likes, but for those a pull under way writes to. Nobody pins its sources."""

    def __init__(self, rng: random.Random, worker: Peer, chains: list[tuple[list[int], list[UnitHash]]]) -> None:
        self.worker = worker
        self._rng = rng
        self._chains = chains
        self._free = list(range(NUM_PAGES))
        self._pulling: dict[PullId, list[int]] = {}

    @property
    def _units_per_page(self) -> int:
        return self.worker.page_size // 16

    def _take(self, number: int) -> list[int]:
        self._rng.shuffle(self._free)
        return [self._free.pop() for _ in range(number)]

    async def act(self, other: RandomOwner) -> None:
        action = self._rng.choice([self._compute, self._copy, self._pull, self._pull, self._cancel])
        if len(self._free) > 12:
            await action(other)
        else:
            await self._end_one()

    async def _compute(self, other: RandomOwner) -> None:
        tokens, _ = self._rng.choice(self._chains)
        tokens = tokens[: self._rng.randrange(1, len(tokens) + 1)]
        pages = self._take(-(-len(tokens) // self.worker.page_size))
        seq = self.worker.next_id()
        whole = chunk(seq, 0, len(tokens), tokens=tokens, pages=grant(pages, len(tokens)))
        await self.worker.client.run(plan(seq, chunks=[whole]))
        await self.worker.client.run(plan(self.worker.next_id(), releases=[release(seq)], max_steps=0))
        self._free += pages

    async def _copy(self, other: RandomOwner) -> None:
        source, target = self._take(2)
        copies = [copy(source, target, self._rng.randrange(1, self.worker.page_size + 1))]
        await self.worker.client.run(plan(self.worker.next_id(), copies=copies, max_steps=0))
        self._free += [source, target]

    async def _pull(self, other: RandomOwner) -> None:
        _, hashes = self._rng.choice(self._chains)
        begin = self._rng.randrange(len(hashes))
        wanted = hashes[begin : self._rng.randrange(begin, len(hashes)) + 1]
        pages = self._take(-(-len(wanted) // self._units_per_page))
        pull = pull_of(other.worker.worker, wanted, pages, pull_id=self.worker.next_id())
        self._pulling[pull.pull_id] = pages
        await self.worker.client.run(self.worker.plan_of(pull))

    async def _cancel(self, other: RandomOwner) -> None:
        if self._pulling:
            pull_id = self._rng.choice(list(self._pulling))
            await self.worker.client.run(self.worker.plan_of(cancelled_pulls=[pull_id]))

    async def _end_one(self) -> None:
        report = await self.worker.client.pulled()
        self._free += self._pulling.pop(report.pull_id)

    async def end_all(self) -> None:
        while self._pulling:
            await self._end_one()
        assert sorted(self._free) == list(range(NUM_PAGES))

    def check(self) -> int:
        """Every resident unit's bytes are its own, and found by its hash; how many there are."""
        runner, residency = self.worker.worker.runner, self.worker.worker.executor.residency
        assert runner.kv is not None
        expected = {
            unit_hash: (tokens[16 * i : 16 * i + 16], list(range(16 * i, 16 * i + 16)))
            for tokens, hashes in self._chains
            for i, unit_hash in enumerate(hashes)
        }
        pages = residency.pages()
        for unit_hash in {h for page in pages for h in page.unit_hashes}:
            assert residency.find([unit_hash]).places
        for page in pages:
            for index, unit_hash in enumerate(page.unit_hashes):
                [place] = [p for p in residency.places(unit_hash) if p.page_id == page.page_id]
                assert place.index == index
                for layer in range(NUM_LAYERS):
                    stored = runner.kv.read(layer, [place]).view(np.int64)[0]
                    assert tuple(stored.tolist()) == expected[unit_hash]
        return sum(len(page.unit_hashes) for page in pages)


@pytest.mark.parametrize("transport", [SHM, GRPC])
@pytest.mark.parametrize("seed", range(3))
async def test_residency_is_true_after_random_plans_with_pulls(seed: int, transport: str) -> None:
    rng = random.Random(seed)
    chains = [(tokens, chain(ROOT, tokens)) for tokens in prompts(rng)]
    runners = [FakeRunner(num_pages=NUM_PAGES, page_size=size) for size in rng.sample([16, 64], 2)]
    async with (
        peer(runners[0], worker_id="a", transports=(transport,)) as a,
        peer(runners[1], worker_id="b", transports=(transport,)) as b,
    ):
        owners = [RandomOwner(rng, worker, chains) for worker in (a, b)]
        for _ in range(NUM_ROUNDS):
            await owners[0].act(owners[1])
            await owners[1].act(owners[0])
        for owner in owners:
            await owner.end_all()
        assert min(owner.check() for owner in owners) > 0
