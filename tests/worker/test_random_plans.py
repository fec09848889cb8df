"""Whatever legal plans a scheduler sends, each sequence's tokens are those of an unbroken run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from kvstore.prefix_hash import chain
from tests.worker.fake_runner import FakeRunner, reference_output
from tests.worker.plans import ROOT, chunk, decode, grant, greedy, plan, release
from tests.worker.test_executor import Client, running
from wire.plan import Decode, PageGrant, PrefillChunk, Release, StepReport
from wire.sampling import FinishReason

NUM_PAGES = 24
MAX_OUTPUT = 30


@dataclass
class Driven:
    """A sequence as the driver knows it."""

    seq: int
    tokens: list[int]
    num_prompt: int
    incarnation: int = 0
    started: bool = False
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    granted: int = 0
    finish_reason: FinishReason | None = None


class RandomScheduler:
    """Sends random legal plans: chunks cut anywhere, leases, grants of any size, preemptions, page reuse."""

    def __init__(self, seed: int, page_size: int) -> None:
        self._random = random.Random(seed)
        self._page_size = page_size
        self._free = list(range(NUM_PAGES))
        self._random.shuffle(self._free)
        self.sequences = []
        for seq in range(6):
            prompt = [self._random.randrange(1, 500) for _ in range(self._random.randrange(1, 60))]
            self.sequences.append(Driven(seq, prompt, len(prompt)))

    async def run(self, client: Client) -> None:
        plan_id = 0
        while unfinished := [s for s in self.sequences if s.finish_reason is None]:
            plan_id += 1
            chosen = self._random.sample(unfinished, self._random.randrange(1, len(unfinished) + 1))
            releases = [self._preempt(s) for s in chosen if s.started and self._random.random() < 0.1]
            steps = [self._step(s) for s in chosen]
            reports = await client.run(
                plan(
                    plan_id,
                    chunks=[s for s in steps if isinstance(s, PrefillChunk)],
                    decodes=[s for s in steps if isinstance(s, Decode)],
                    releases=releases,
                    max_steps=self._random.choice([1, 1, 2, 5, 16]),
                )
            )
            self._absorb(reports)

    def _preempt(self, s: Driven) -> Release:
        released = release(s.seq, incarnation=s.incarnation)
        self._free += s.pages
        self._random.shuffle(self._free)
        s.incarnation, s.started, s.computed, s.pages, s.granted = s.incarnation + 1, False, 0, [], 0
        return released

    def _step(self, s: Driven) -> PrefillChunk | Decode | None:
        if s.started and s.computed == len(s.tokens) - 1 >= s.num_prompt:
            return decode(s.seq, self._grow(s, s.computed + self._random.randrange(1, 20)), incarnation=s.incarnation)
        num_tokens = self._random.randrange(1, len(s.tokens) - s.computed + 1)
        pages = self._grow(s, s.computed + num_tokens)
        num_tokens = min(num_tokens, s.granted - s.computed)
        if num_tokens < 1:
            return None
        tokens = None if s.started else s.tokens
        s.started = True
        return chunk(
            s.seq,
            s.computed,
            num_tokens,
            tokens=tokens,
            num_prompt=s.num_prompt,
            pages=pages,
            sampling=greedy(MAX_OUTPUT),
            incarnation=s.incarnation,
        )

    def _grow(self, s: Driven, slots: int) -> PageGrant:
        """A grant for as many of the slots as there are pages, some of it repeated."""
        repeat = self._random.randrange(len(s.pages) + 1)
        while len(s.pages) * self._page_size < slots and self._free:
            s.pages.append(self._free.pop())
        s.granted = max(s.granted, min(slots, len(s.pages) * self._page_size))
        return grant(s.pages[repeat:], s.granted, first_index=repeat)

    def _absorb(self, reports: list[StepReport]) -> None:
        for progress in (p for report in reports for p in report.progress):
            s = self.sequences[progress.seq_id]
            assert progress.incarnation == s.incarnation
            assert progress.error is None
            assert s.computed < progress.num_computed <= s.granted
            s.computed = progress.num_computed
            s.tokens += progress.tokens
            if progress.finish_reason is not None:
                s.finish_reason = progress.finish_reason
                self._free += s.pages


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("seed", range(4))
async def test_random_plans_give_the_output_of_an_unbroken_run(seed: int, page_size: int) -> None:
    scheduler = RandomScheduler(seed, page_size)
    async with running(FakeRunner(num_pages=NUM_PAGES, page_size=page_size)) as (executor, client):
        await scheduler.run(client)
        snapshot = await Client(executor).open()
    known = set()
    for s in scheduler.sequences:
        output = s.tokens[s.num_prompt :]
        assert output == reference_output(s.tokens[: s.num_prompt], MAX_OUTPUT)
        assert s.finish_reason is (FinishReason.LENGTH if len(output) == MAX_OUTPUT else FinishReason.STOP)
        known.update(chain(ROOT, s.tokens[:-1]))
    assert snapshot.residents
    assert {h for page in snapshot.residents for h in page.unit_hashes} <= known
