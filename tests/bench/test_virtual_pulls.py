"""Pulls between virtual workers keep the worker's contract: exactly one last report, nothing stale."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

import pytest

from bench.simulator import CARD
from bench.virtual_worker import VirtualWorker, WorkerReport
from gpu_worker.step_cost import PullCost, StepCost
from kvstore.prefix_hash import chain
from tests.worker.plans import ROOT, chunk, grant, plan
from wire.ids import UNIT_TOKENS, Epoch, PageId, PullId, UnitHash, WorkerId
from wire.plan import KvPull, PullReport, Role, StepReport, WorkerInfo

PROMPT = list(range(100, 196))
UNITS = chain(ROOT, PROMPT)
COST = PullCost(fixed_us=1000, unit_us=500)
LEASE_MS = 3000


class Cell:
    """Two workers and the clock; nobody schedules."""

    def __init__(self, cost: PullCost = COST) -> None:
        self.now = 0.0
        self.reports: dict[str, list[tuple[float, WorkerReport]]] = {"source": [], "target": []}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.source, self.target = (self._worker(name, cost) for name in ("source", "target"))
        self.source.submit(plan(1, chunks=[chunk(1, 0, 96, tokens=PROMPT, pages=grant(range(6), 96))]))
        self.run()

    def _worker(self, name: str, cost: PullCost) -> VirtualWorker:
        info = WorkerInfo(WorkerId(name), Epoch(1), Role.BOTH, f"{name}:1", CARD, 32, 16, UNIT_TOKENS, unit_bytes=1)
        return VirtualWorker(
            info,
            StepCost(fixed_us=100),
            after=self.after,
            deliver=self._deliver,
            pull=cost,
            source_of=self._source_of,
        )

    def _source_of(self, pull: KvPull) -> VirtualWorker | None:
        return None if self.source.is_stopped or pull.source_epoch != 1 else self.source

    def _deliver(self, worker: VirtualWorker, report: WorkerReport) -> None:
        self.reports[worker.info.worker_id].append((self.now, report))

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), call))

    def run(self, until_s: float = 1e9) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, call = heapq.heappop(self._heap)
            call()

    def pull(self, pull_id: int, units: list[UnitHash], pages: list[int], plan_id: int = 1, epoch: int = 1) -> None:
        order = KvPull(
            PullId(pull_id),
            WorkerId("source"),
            "source:1",
            Epoch(epoch),
            units,
            [PageId(page) for page in pages],
            LEASE_MS,
        )
        wanted = plan(plan_id, max_steps=0)
        wanted.kv_pulls = [order]
        self.target.submit(wanted)

    def pull_reports(self) -> list[tuple[float, PullReport]]:
        return [(at_s, report) for at_s, report in self.reports["target"] if isinstance(report, PullReport)]

    def ends(self) -> list[PullReport]:
        return [report for _, report in self.pull_reports() if report.done]


def test_a_pull_takes_its_time_and_its_units_are_resident_when_it_is_done() -> None:
    cell = Cell()
    began_s = cell.now
    cell.pull(7, UNITS, [10, 11, 12, 13, 14, 15])
    cell.run(began_s + 0.0039)
    assert cell.ends() == [] and cell.target.residency.find(UNITS).places == []
    cell.run()
    [(ended_s, report)] = cell.pull_reports()
    assert (report.pull_id, report.num_units, report.failure) == (7, 6, None)
    assert round(1e6 * (ended_s - began_s)) == report.elapsed_us == 1000 + 6 * 500
    assert [place.page_id for place in cell.target.residency.find(UNITS).places] == [10, 11, 12, 13, 14, 15]


def test_units_that_the_source_lacks_end_a_pull_early_and_it_says_so() -> None:
    cell = Cell()
    cell.pull(1, [*UNITS[:4], UnitHash(b"?" * 32)], [10, 11, 12, 13, 14])
    cell.run()
    [report] = cell.ends()
    assert report.num_units == 4 and report.failure == "1 units are not there"
    assert len(cell.target.residency.find(UNITS).places) == 4


def test_a_page_that_gets_a_new_owner_meanwhile_fails_the_pull() -> None:
    cell = Cell()
    cell.pull(1, UNITS, [10, 11, 12, 13, 14, 15])
    cell.run(cell.now + 0.002)
    other = chunk(2, 0, 16, tokens=list(range(500, 516)), pages=grant([3], 16))
    cell.source.submit(plan(2, chunks=[other]))
    cell.run()
    [report] = cell.ends()
    assert report.num_units == 0 and report.failure == "a page got a new owner meanwhile"
    assert cell.target.residency.find(UNITS).places == []


def test_the_sources_death_and_another_life_of_it_fail_a_pull() -> None:
    cell = Cell()
    cell.pull(1, UNITS, [10, 11, 12, 13, 14, 15], epoch=2)
    cell.run()
    cell.pull(2, UNITS, [10, 11, 12, 13, 14, 15], plan_id=2)
    cell.run(cell.now + 0.001)
    cell.source.stop()
    cell.run()
    assert [report.failure for report in cell.ends()] == ["source is gone", "source died"]


def test_a_long_pull_renews_its_lease_until_it_is_cancelled_and_ends_once() -> None:
    cell = Cell(PullCost(unit_us=1_000_000))
    cell.pull(1, UNITS, [10, 11, 12, 13, 14, 15])
    began_s = cell.now
    cell.run(began_s + 3.5)
    cell.now = began_s + 3.5
    stop = plan(2, max_steps=0)
    stop.cancelled_pulls = [PullId(1)]
    cell.target.submit(stop)
    cell.run()
    reports = cell.pull_reports()
    assert [round(at_s - began_s, 3) for at_s, report in reports if not report.done] == [1.0, 2.0, 3.0]
    assert reports[-1][0] == pytest.approx(began_s + 3.5)
    assert [(report.num_units, report.failure) for report in cell.ends()] == [(0, "cancelled")]


def test_a_cancelled_pull_that_waits_lets_the_others_go_on() -> None:
    cell = Cell()
    for number in (1, 2, 3):
        cell.pull(number, UNITS[:2], [10 * number, 10 * number + 1], plan_id=number)
    stop = plan(4, max_steps=0)
    stop.cancelled_pulls = [PullId(2)]
    cell.target.submit(stop)
    cell.run()
    assert [(report.pull_id, report.failure) for report in cell.ends()] == [(2, "cancelled"), (1, None), (3, None)]


def test_pulls_of_one_target_share_its_link_and_steps_run_beside_them() -> None:
    cell = Cell()
    began_s = cell.now
    cell.pull(1, UNITS[:2], [10, 11])
    cell.pull(2, UNITS[:4], [20, 21, 22, 23], plan_id=2)
    cell.target.submit(plan(3, chunks=[chunk(5, 0, 16, tokens=PROMPT[:16], pages=grant([1, 2], 32))]))
    cell.run()
    ended_s = [round(1e6 * (at_s - began_s)) for at_s, report in cell.pull_reports() if report.done]
    assert ended_s == [2000, 5000]
    [stepped_s] = [at_s for at_s, r in cell.reports["target"] if isinstance(r, StepReport) and r.plan_id == 3]
    assert round(1e6 * (stepped_s - began_s)) == 100
