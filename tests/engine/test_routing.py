"""Which worker a request goes to: by prefix and load, by each of the modes, and the same every time."""

from __future__ import annotations

import random

import pytest

from scheduler.commands import Admission
from tests.engine.driver import Driver, prompt, slow
from wire.plan import Role

HOT = prompt(200)


def admission(driver: Driver, name: str) -> Admission:
    return driver.finished[name].timeline.admissions[0]


def homes(driver: Driver) -> list[str]:
    """Where each request went first, in order of arrival."""
    return [finish.timeline.admissions[0].worker_id for _, finish in sorted(driver.finished.items())]


def traffic(driver: Driver, *, requests: int = 30, prefixes: int = 4) -> Driver:
    """Requests of a few shared prefixes, a step or two apart."""
    chance = random.Random(5)
    for number in range(requests):
        shared = prompt(160, chance.randrange(prefixes))
        driver.arrive(f"r{number:03}", [*shared, 2 + number % 40, 3], chance.randrange(1, 20))
        driver.step()
    driver.run()
    driver.assert_done(*driver.finished)
    assert len(driver.finished) == requests
    return driver


def test_a_request_goes_to_the_worker_that_holds_its_prefix() -> None:
    driver = Driver(workers=3, pages=64, pulls=True, step_us=slow)
    for number in range(3):
        driver.arrive(f"a{number}", prompt(200, number), 4)
        driver.run()
        driver.arrive(f"b{number}", [*prompt(200, number), 5], 4)
        driver.run()
        assert admission(driver, f"a{number}").worker_id == admission(driver, f"b{number}").worker_id
        assert admission(driver, f"b{number}").predicted_cached_tokens == 192
        assert not driver.finished[f"b{number}"].timeline.transfers


def test_a_hot_prefix_spreads_once_its_workers_queue_outweighs_the_pull() -> None:
    driver = Driver(workers=2, pages=64, pulls=True, step_us=slow, step_token_budget=256)
    driver.arrive("warm", HOT, 1)
    driver.run()
    home = admission(driver, "warm").worker_id
    for number in range(6):
        driver.arrive(f"r{number}", [*HOT, *prompt(40, number)], 8)
    driver.run()
    first = admission(driver, "r0")
    assert first.worker_id == home and first.pull_source is None
    spread = [admission(driver, f"r{n}") for n in range(6) if admission(driver, f"r{n}").worker_id != home]
    assert spread and spread[0].pull_source == home
    for taken in spread:
        costs = {c.worker_id: c for c in taken.candidates}
        pulled, at_home = costs[taken.worker_id], costs[home]
        waiting = at_home.queued_prefill_tokens + at_home.kv_pressure + at_home.active_decodes
        assert 0 < pulled.pull_cost_tokens < waiting and pulled.uncached_tokens == at_home.uncached_tokens


def test_without_pulls_a_hot_prefix_stays_until_the_queue_outweighs_its_prefill() -> None:
    driver = Driver(workers=2, pages=64, pulls=True, step_us=slow, step_token_budget=256, kv_pull=False)
    driver.arrive("warm", HOT, 1)
    driver.run()
    for number in range(6):
        driver.arrive(f"r{number}", [*HOT, *prompt(40, number)], 8)
    driver.run()
    assert not any(finish.timeline.transfers for finish in driver.finished.values())


@pytest.mark.parametrize("routing", ["precise", "approximate", "least_loaded", "random"])
def test_each_mode_is_decided_by_the_seed_alone(routing: str) -> None:
    def run(seed: int) -> list[str]:
        workers = {"workers": 3, "pages": 64, "pulls": True, "step_us": slow}
        return homes(traffic(Driver(**workers, routing=routing, routing_seed=seed)))  # type: ignore[arg-type]

    assert run(1) == run(1)
    if routing == "random":
        assert run(1) != run(2)


@pytest.mark.parametrize("routing", ["precise", "approximate"])
def test_modes_that_know_prefixes_prefill_less(routing: str) -> None:
    def prefilled(routing: str) -> int:
        driver = traffic(Driver(workers=3, pages=64, step_us=slow, routing=routing))
        return sum(chunk.num_tokens for plan in driver.plans for chunk in plan.prefill_chunks)

    assert prefilled(routing) < 0.9 * prefilled("random")


def test_the_least_loaded_worker_is_taken_whatever_it_holds() -> None:
    driver = Driver(workers=2, pages=64, routing="least_loaded")
    driver.arrive("warm", HOT, 1)
    driver.run()
    home = admission(driver, "warm").worker_id
    driver.arrive("holder", HOT, 60)
    driver.arrive("next", [*HOT, 5], 4)
    driver.run()
    homes = {admission(driver, name).worker_id for name in ("holder", "next")}
    assert homes == set(driver.workers) and home in homes


def test_random_takes_every_worker_about_as_often() -> None:
    driver = traffic(Driver(workers=3, pages=64, routing="random"), requests=90)
    taken = homes(driver)
    assert all(15 <= taken.count(worker_id) <= 45 for worker_id in driver.workers)


def test_the_fewer_decodes_a_worker_has_the_more_it_gets_for_handoff() -> None:
    driver = Driver(roles=[Role.PREFILL, Role.DECODE, Role.DECODE], pages=64, step_us=slow)
    driver.arrive("first", prompt(200, 1), 60)
    driver.step_until(lambda: len(driver.outputs["first/0"]) > 2, end_pulls=True)
    driver.arrive("second", prompt(200, 2), 60)
    driver.run()
    decoded = {driver.finished[name].timeline.admissions[-1].worker_id for name in ("first", "second")}
    assert decoded == {"w1", "w2"}
