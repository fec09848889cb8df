"""Pulls of simulated workers: in earnest and in time, and the contract of every other puller's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpu_worker.simulated_pulls import SimulatedPuller
from gpu_worker.simulated_runner import SimulatedRunner, TokenSource
from gpu_worker.step_cost import PullCost, StepCost
from gpu_worker.transfer.port import RunningPull, UnitPlace
from tests.transfer.peers import HASHES, PROMPT, peer
from tests.worker.fake_runner import CARD
from tests.worker.plans import chunk, grant, plan
from tests.worker.test_executor import finish_of, tokens_of
from wire.ids import Epoch, PageId, PullId, UnitHash, WorkerId
from wire.plan import KvPull, PullReport
from wire.sampling import FinishReason, SamplingParams

TIMEOUT_S = 20.0
FOREVER_US = 1e9
SEEDED = SamplingParams(20, seed=99)


class InstantPuller:
    """Its pulls are over as soon as they begin: reports come from a thread, as the contract says."""

    def __init__(self, failure: str | None = None) -> None:
        self._failure = failure
        self.threads = ThreadPoolExecutor(4)

    def begin(self, pull: KvPull, places: Sequence[UnitPlace], report: Callable[[PullReport], None]) -> RunningPull:
        failed = self._failure is not None
        last = PullReport(pull.pull_id, True, 1 if failed else len(places), self._failure, "shm", 640, elapsed_us=5)
        return InstantPull(threading.Event(), self.threads, last, report)


class InstantPull:
    def __init__(
        self,
        over: threading.Event,
        threads: ThreadPoolExecutor,
        last: PullReport,
        report: Callable[[PullReport], None],
    ) -> None:
        self._over = over
        self._running = threads.submit(self._end, last, report)

    def _end(self, last: PullReport, report: Callable[[PullReport], None]) -> None:
        report(last)
        self._over.set()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def cancel(self) -> None: ...

    def wait(self) -> None:
        self._running.result(TIMEOUT_S)


def order(pull_id: int = 1, lease_ms: int = 60_000) -> KvPull:
    units = [UnitHash(bytes([n]) * 32) for n in range(4)]
    return KvPull(PullId(pull_id), WorkerId("s"), "s:1", Epoch(1), units, [PageId(0)], lease_ms)


PLACES = [UnitPlace(PageId(0), index) for index in range(4)]


def pulled(cost: PullCost, *pulls: KvPull, failure: str | None = None) -> list[PullReport]:
    """Begin pulls and wait for them; all their reports in the order they came."""
    reports: list[PullReport] = []
    puller = SimulatedPuller(InstantPuller(failure), cost)
    for running in [puller.begin(pull, PLACES, reports.append) for pull in pulls]:
        running.wait()
        assert running.is_over
    return reports


def test_a_pull_that_succeeds_takes_its_predicted_time() -> None:
    [report] = pulled(PullCost(fixed_us=5_000, unit_us=1_000), order())
    assert (report.done, report.num_units, report.failure, report.num_bytes) == (True, 4, None, 640)
    assert report.elapsed_us == 9_000


def test_free_pulls_take_the_time_they_take() -> None:
    [report] = pulled(PullCost(), order())
    assert report.elapsed_us == 5


def test_a_failure_is_told_at_once_and_as_it_was() -> None:
    [report] = pulled(PullCost(unit_us=FOREVER_US), order(), failure="the source is gone")
    assert (report.num_units, report.failure, report.elapsed_us) == (1, "the source is gone", 5)


def test_pulls_share_the_link() -> None:
    reports = pulled(PullCost(unit_us=5_000), order(1), order(2))
    assert [report.done for report in reports] == [True, True]
    assert reports[0].elapsed_us == 20_000 <= reports[1].elapsed_us - 15_000


def test_a_long_pull_renews_its_lease_before_its_last_report() -> None:
    reports = pulled(PullCost(unit_us=50_000), order(lease_ms=60))
    assert [report.done for report in reports] == [False] * (len(reports) - 1) + [True]
    assert len(reports) > 3


def test_a_cancelled_pull_ends_at_once_and_brings_nothing() -> None:
    reports: list[PullReport] = []
    running = SimulatedPuller(InstantPuller(), PullCost(unit_us=FOREVER_US)).begin(order(), PLACES, reports.append)
    running.cancel()
    running.wait()
    assert [(report.done, report.num_units, report.failure) for report in reports] == [(True, 0, "cancelled")]


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_sequence_goes_on_from_pulled_units_and_not_from_pages_nobody_filled(transport: str) -> None:
    def runner(page_size: int) -> Any:  # peers ask it for nothing but what every runner has
        return SimulatedRunner(CARD, StepCost(), num_pages=64, page_size=page_size)

    async with (
        peer(runner(16), worker_id="source", transports=(transport,)) as source,
        peer(runner(32), worker_id="target", transports=(transport,)) as target,
    ):
        await source.compute()
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, report.failure, report.transport) == (8, None, transport)
        pages = grant(range(5), 160)
        wrong = grant(range(20, 25), 160)
        chunks = [
            chunk(seq, 128, 12, tokens=PROMPT, pages=where, sampling=SEEDED) for seq, where in ((1, pages), (2, wrong))
        ]
        reports = await target.client.run(plan(target.next_id(), chunks=chunks, max_steps=20))
        expected = TokenSource(CARD.vocab_size, CARD.eos_token_ids).tokens([99] * 20, [0] * 20, range(20))
        assert tokens_of(reports, 1) == expected
        assert (tokens_of(reports, 2), finish_of(reports, 2)) == ([], FinishReason.ERROR)
        assert set(HASHES) <= target.resident()
