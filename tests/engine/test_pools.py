"""Pools of workers by prompt length: who waits for one holds up nobody for another, and nobody starves."""

from __future__ import annotations

import pytest

from tests.engine.driver import Driver, make_request, prompt
from tests.engine.paged_worker import expected_output
from wire.plan import Role


def home(driver: Driver, name: str) -> str:
    return driver.finished[name].timeline.admissions[0].worker_id


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
