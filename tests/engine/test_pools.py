"""Pools of workers by prompt length: who waits for one holds up nobody for another, and nobody starves."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from scheduler.policy import pool_queues
from scheduler.sequence import Sequence
from scheduler.worker_view import WorkerView
from tests.engine.driver import Driver, make_request, prompt, slow
from tests.engine.paged_worker import PagedWorker, expected_output
from wire.plan import Role


def home(driver: Driver, name: str) -> str:
    return driver.finished[name].timeline.admissions[0].worker_id


def join(driver: Driver, name: str, **fields: Any) -> PagedWorker:
    """A worker comes late."""
    worker = PagedWorker(name, 16, 16, driver.config.step_token_budget, peers=driver.workers, **fields)
    driver.join(worker)
    return worker


def test_each_prompt_goes_to_the_pool_of_its_length() -> None:
    driver = Driver(workers=2, pages=64, prompt_ranges=[(0, 100), (101, 0)])
    for number in range(6):
        driver.arrive(f"short{number}", prompt(40 + 12 * number, number), 4)
        driver.arrive(f"long{number}", prompt(101 + number, number), 4)
    driver.run()
    assert {home(driver, f"short{n}") for n in range(6)} == {"w0"}
    assert {home(driver, f"long{n}") for n in range(6)} == {"w1"}


@pytest.mark.parametrize(("waits", "passes"), [(150, 20), (20, 150)])
def test_who_waits_for_one_pool_holds_up_nobody_for_another(waits: int, passes: int) -> None:
    driver = Driver(workers=2, pages=16, max_running=1, prompt_ranges=[(0, 100), (101, 0)])
    driver.arrive("runs", prompt(waits, 1), 90)
    driver.arrive("waits", prompt(waits, 2), 4)
    driver.arrive("passes", prompt(passes, 3), 4)
    driver.run()
    assert list(driver.finished) == ["passes", "runs", "waits"]


def test_a_prompt_that_no_pool_is_for_goes_anywhere() -> None:
    driver = Driver(workers=2, pages=16, prompt_ranges=[(0, 100), (101, 150)])
    driver.arrive("longer", prompt(200), 4)
    driver.run()
    driver.assert_done("longer")


def test_a_prompt_too_large_for_its_pool_goes_to_another() -> None:
    driver = Driver(workers=2, pages=16, page_size=[16, 64], prompt_ranges=[(0, 100), (101, 0)])
    driver.arrive("grows", prompt(90), 200)
    driver.run()
    driver.assert_done("grows")
    assert home(driver, "grows") == "w1"


def test_a_pool_that_only_prefills_is_no_pool() -> None:
    """The only worker for such prompts that decodes is of another pool: it serves them all the same."""
    driver = Driver(roles=[Role.PREFILL, Role.DECODE], pages=64, prompt_ranges=[(101, 0), (0, 100)])
    driver.arrive("long", prompt(200), 20)
    driver.run()
    driver.assert_done("long")
    assert driver.outputs["long/0"] == expected_output(prompt(200), make_request("x", [2], 20).sampling)


@pytest.mark.parametrize("shared_first", [False, True])
def test_pools_that_share_a_worker_starve_nobody(shared_first: bool) -> None:
    """Short prompts may go to either worker, long ones to one of them: whenever a page is free there, a short one is
    there to take it."""
    ranges = [(0, 0), (0, 100)] if shared_first else [(0, 100), (0, 0)]
    driver = Driver(workers=2, pages=16, prompt_ranges=ranges)
    for number in range(8):
        driver.arrive(f"first{number}", prompt(30, number), 20 + number)
    driver.arrive("long", prompt(200, 50), 4)
    number = 0
    while "long" not in driver.finished:
        driver.arrive(f"short{number}", prompt(30, 60 + number), 20 + number % 20)
        number += 1
        driver.step()
        assert number < 200, "short ones overtake it for ever"
    before = any(output for name, output in driver.outputs.items() if name.startswith("short"))
    driver.run()
    driver.assert_done("long", *(f"short{n}" for n in range(number)))
    assert before, "while it waits for its worker the other one serves short prompts"


@pytest.mark.parametrize("lost_first", [False, True])
def test_what_came_before_any_worker_waits_by_pools_as_soon_as_they_are_there(lost_first: bool) -> None:
    """Not in one queue, in which the head that waits for one pool holds up the others."""
    driver = Driver(workers=int(lost_first), max_running=1, page_size=16)
    if lost_first:
        driver.lose(driver.worker)
    driver.arrive("runs", prompt(150, 1), 90)
    driver.arrive("waits", prompt(150, 2), 4)
    driver.arrive("passes", prompt(20, 3), 4)
    join(driver, "long", prompt_range=(101, 0))
    driver.step()
    assert not driver.outputs["passes/0"], "no pool is for it: it waits with the others"
    join(driver, "short", prompt_range=(0, 100))
    driver.run()
    driver.assert_done("runs", "waits", "passes")
    assert list(driver.finished) == ["passes", "runs", "waits"]
    assert [home(driver, name) for name in ("runs", "waits", "passes")] == ["long", "long", "short"]


def test_what_came_before_any_worker_is_handed_off_where_workers_have_roles() -> None:
    driver = Driver(workers=0, max_running=1, step_us=slow)
    driver.arrive("first", prompt(40, 1), 30)
    driver.arrive("long", prompt(150, 2), 4)
    join(driver, "decodes", role=Role.DECODE, step_us=slow)
    join(driver, "prefills", role=Role.PREFILL, step_us=slow)
    driver.run()
    driver.assert_done("first", "long")
    admissions = driver.finished["long"].timeline.admissions
    assert [(a.worker_id, a.role) for a in admissions] == [("prefills", Role.PREFILL), ("decodes", Role.DECODE)]


def test_what_ran_where_no_pool_was_for_it_goes_to_its_pool_when_it_must_move() -> None:
    driver = Driver(workers=0, max_running=1)
    driver.arrive("moves", prompt(20, 1), 40)
    first = join(driver, "long", prompt_range=(101, 0))
    driver.step()
    join(driver, "short", prompt_range=(0, 100))
    driver.arrive("short too", prompt(20, 2), 60)
    driver.lose(first)
    join(driver, "long too", prompt_range=(101, 0))
    driver.arrive("long", prompt(150, 3), 4)
    driver.run()
    driver.assert_done("moves", "short too", "long")
    assert [a.worker_id for a in driver.finished["moves"].timeline.admissions] == ["long", "short"]
    assert home(driver, "long") == "long too"


def test_one_that_must_move_does_not_have_all_that_wait_sorted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(workers=0, max_running=1)
    for number in range(20):
        driver.arrive(f"r{number}", prompt(20, number), 4)
    first = join(driver, "first", prompt_range=(101, 0))
    join(driver, "second", prompt_range=(101, 0))
    driver.step()
    sorted_in: list[Sequence] = []
    pools_for = pool_queues._pools_for

    def counted(seq: Sequence, workers: Collection[WorkerView]) -> pool_queues.Pools:
        sorted_in.append(seq)
        return pools_for(seq, workers)

    monkeypatch.setattr(pool_queues, "_pools_for", counted)
    driver.lose(first)
    assert len(sorted_in) == 1
    driver.run()
    driver.assert_done(*(f"r{number}" for number in range(20)))
