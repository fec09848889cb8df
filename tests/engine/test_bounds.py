"""However long workers, requests and pulls come, fail and go: what the engine remembers of them stays bounded."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator, Set
from typing import Any

import pytest

from kvstore.prefix_twin import PrefixTwin
from scheduler.blame import MAX_BLAMED, Blame
from scheduler.events import CancelRequested, RoleChanged, StepReported, Tick
from scheduler.policy.step_time import StepTimeModel
from scheduler.policy.transfers import DISTRUST_S
from scheduler.request_book import REMEMBERED
from scheduler.sequence import LiveRequest
from scheduler.worker_view import WorkerView
from tests.engine.driver import Driver, make_request, prompt, slow
from tests.engine.paged_tiers import PagedRedis
from tests.engine.paged_worker import PagedWorker
from wire.config import BatchingConfig
from wire.ids import PlanId, RequestId
from wire.plan import Role, StepReport

NUM_WORKERS = 1500
"""That came and went, each under a name of its own."""
REDIS_UNITS = 40
STATED = {
    r"engine\._book\._ended": REMEMBERED,
    r"engine\._book\._early_cancels": REMEMBERED,
    r".*\.shared\._layouts": 1,  # of the one layout here, until its TTL is over
    r".*\.shared\._layouts\.layout": REDIS_UNITS,
    r".*\.times\._factors": 3,  # kinds of links
}
"""What may be left when nobody is there any more; of everything else, nothing."""
LEAVES = (BatchingConfig, PrefixTwin, StepTimeModel)
"""Whose inside is not looked at: of no table, or tested where it is."""


def tables(found: object, path: str = "engine", seen: set[int] | None = None) -> Iterator[tuple[str, int]]:
    """Every container that can be reached from an object of the engine's, and how much it holds."""
    seen = set() if seen is None else seen
    if id(found) in seen or isinstance(found, (str, bytes, tuple, *LEAVES)):
        return
    seen.add(id(found))
    if isinstance(found, (dict, list, deque, Set)):
        yield path, len(found)
        if path.endswith("_ended"):
            return
        items = found.items() if isinstance(found, dict) else enumerate(found)
        for key, item in items:
            yield from tables(item, f"{path}.{key if isinstance(key, str) else '*'}", seen)
    elif type(found).__module__.split(".")[0] in ("scheduler", "kvstore"):
        for name in _fields(found):
            yield from tables(getattr(found, name), f"{path}.{name}", seen)


def _fields(found: object) -> list[str]:
    slots = [name for cls in type(found).__mro__ for name in getattr(cls, "__slots__", ())]
    return [name for name in [*slots, *getattr(found, "__dict__", {})] if hasattr(found, name)]


def too_full(driver: Driver) -> dict[str, int]:
    stated = {re.compile(pattern): bound for pattern, bound in STATED.items()}
    return {
        path: size
        for path, size in tables(driver.engine)
        if size > max([bound for pattern, bound in stated.items() if pattern.fullmatch(path)], default=0)
    }


class Churn:
    def __init__(self, **config: Any) -> None:
        self.random = random.Random(7)
        self.redis = PagedRedis(REDIS_UNITS, ttl_ms=10_000)
        self.driver = Driver(workers=0, step_us=slow, max_running=3, pull_lease_ms=500, **config)
        self.num_workers = self.num_requests = self.num_failed_pulls = 0

    def round(self) -> None:
        driver, rand = self.driver, self.random
        while len(driver.workers) < 3:
            self._join()
        while self.num_requests - len(driver.finished) < 6:
            self._arrive()
        for _ in range(rand.randrange(1, 6)):
            for worker in list(driver.workers.values()):
                worker.run_step()
                for pull_id in list(worker.pulls):
                    if rand.random() < 0.7:
                        most_units = rand.choice([None, 0, 2])
                        self.num_failed_pulls += most_units is not None
                        worker.finish_pull(pull_id, most_units)
                driver.deliver(worker)
        if rand.random() < 0.2:
            driver.feed(CancelRequested(RequestId(f"r{rand.randrange(self.num_requests + 3)}"), "disconnect"))
        if rand.random() < 0.1:
            driver.feed(RoleChanged(rand.choice(list(driver.workers)), rand.choice(list(Role))))
        driver.pass_time(rand.choice([0.1, 0.3, 1.0]))
        worker = rand.choice(list(driver.workers.values()))
        if rand.random() < 0.5:
            driver.lose(worker)
        else:
            self._fail(worker)

    def end(self) -> None:
        """Everything that was begun is over; then nobody is there any more, for a while."""
        for _ in range(4):  # some wait for a worker that may decode
            self._join(Role.BOTH)
        self.driver.run()
        assert len(self.driver.finished) == self.num_requests
        for worker in list(self.driver.workers.values()):
            self.driver.lose(worker)
        self.driver.pass_time(DISTRUST_S)
        self.driver.pass_time(10.0)

    def _join(self, role: Role | None = None) -> None:
        self.num_workers += 1
        self.driver.join(
            PagedWorker(
                f"w{self.num_workers}",
                12,
                self.random.choice([16, 64]),
                self.driver.config.step_token_budget,
                step_us=slow,
                role=role or self.random.choice([Role.BOTH, Role.BOTH, Role.PREFILL, Role.DECODE]),
                peers=self.driver.workers,
                tier_units=6,
                redis=self.redis,
                prompt_range=self.random.choice([(0, 0), (0, 0), (0, 60 + self.num_workers), (50, 0)]),
            )
        )

    def _arrive(self) -> None:
        tokens = prompt(self.random.randrange(20, 150), self.random.randrange(3))
        number = self.num_requests
        self.num_requests += 1
        tenant = f"tenant{number}"  # every one another
        self.driver.arrive(f"r{number}", tokens, self.random.randrange(1, 8), tenant=tenant, num_choices=1 + number % 2)

    def _fail(self, worker: PagedWorker) -> None:
        """A step raises there; the worker does not come back."""
        del self.driver.workers[worker.info.worker_id]
        failed = StepReport(PlanId(1), 0, True, [], failure="boom")
        self.driver.feed(StepReported(worker.info.worker_id, worker.info.epoch, failed))


@pytest.mark.parametrize("routing", ["precise", "approximate"])
def test_nothing_is_left_of_workers_requests_and_pulls_that_are_over(routing: str) -> None:
    churn = Churn(routing=routing)
    while churn.num_workers < NUM_WORKERS:
        churn.round()
    churn.end()
    assert not too_full(churn.driver)
    assert not any(churn.driver.engine.twin.count(f"w{n}") for n in range(NUM_WORKERS))  # type: ignore[arg-type]
    failed = [f for f in churn.driver.finished.values() if f.terminal.error_code is not None]
    assert failed, "some were ended by what failed around them"
    assert churn.num_failed_pulls > 100 or routing != "precise"


def test_while_they_come_and_go_the_tables_grow_no_more() -> None:
    """Also what is only let go of once all is over would grow under a load that never ends."""
    churn = Churn()
    largest = []
    for _ in range(2):
        sizes = [0]
        for _ in range(NUM_WORKERS // 5):
            churn.round()
            sizes.append(sum(n for path, n in tables(churn.driver.engine) if not path.startswith("engine._book.")))
        largest.append(max(sizes[-50:]))
    assert largest[1] < 1.5 * largest[0]


def test_an_idle_worker_holds_nothing_of_what_ran_there() -> None:
    driver = Driver(workers=2, pages=24, pulls=True, tier_units=4, step_us=slow)
    for number in range(12):
        driver.arrive(f"r{number}", prompt(40 + 10 * number, number % 3), 20)
        driver.step(end_pulls=number % 2 == 0)
    driver.run()
    for view in driver.engine._workers.values():
        held = {path: n for path, n in tables(view, "worker") if n and not path.startswith("worker.pool.")}
        assert not held


def test_of_lost_workers_with_somebody_to_blame_so_many_are_remembered() -> None:
    request = LiveRequest(make_request("r", [2]), 1)
    blame = Blame({RequestId("r")})
    for number in range(3 * MAX_BLAMED):
        blame.worker_lost(WorkerView(PagedWorker(f"w{number}", 4, 16, 64).info, [], BatchingConfig()), [request])
        request.faults = 0
    assert len(blame._by_worker) == MAX_BLAMED


def test_blame_passes_with_its_requests() -> None:
    driver = Driver(workers=2, pages=24)
    driver.arrive("r", prompt(40), 30)
    driver.step()
    driver.lose(driver.worker)
    driver.run()
    driver.feed(Tick())
    assert not driver.engine._blame._by_worker
