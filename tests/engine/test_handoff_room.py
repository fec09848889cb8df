"""Pages held for a handoff, and decodes that need pages: who gives way, and that nobody waits for ever."""

from __future__ import annotations

from scheduler.events import CancelRequested
from tests.engine.driver import Driver, prompt
from tests.engine.paged_worker import PagedWorker
from tests.engine.test_handoff import ends, path, split, wanted
from wire.ids import RequestId
from wire.plan import Role


def test_room_that_a_cancelled_handoff_held_goes_to_a_decode_that_waits_for_it() -> None:
    driver = split(pages=16, max_running=4, step_token_budget=16)
    _, decode = ends(driver)
    driver.arrive("grows", prompt(10, 1), 200)
    driver.arrive("long", prompt(190), 4)
    driver.step_until(lambda: decode.pulls)
    for _ in range(200):  # the pull is slow
        decode.run_step()
        driver.deliver(decode)
    assert driver.pages(decode).free == driver.pages(decode).cached == 0 and "grows" not in driver.finished
    driver.feed(CancelRequested(RequestId("long"), "disconnect"))
    driver.run()
    driver.assert_done("grows", "long")


def decode_alone(driver: Driver, decode: PagedWorker, steps: int) -> None:
    """The prefill worker is slow: between two chunks nothing is pulled."""
    for _ in range(steps):
        decode.run_step()
        for pull_id in list(decode.pulls):
            decode.finish_pull(pull_id)
        driver.deliver(decode)


def test_a_decode_does_not_wait_for_pages_that_are_held_for_a_prefill_elsewhere() -> None:
    driver = split(pages=16, max_running=4, step_token_budget=16)
    _, decode = ends(driver)
    driver.arrive("grows", prompt(10, 1), 200)
    driver.arrive("long", prompt(190), 4)
    driver.step_until(lambda: decode.pulls)
    decode_alone(driver, decode, 250)
    assert list(driver.finished) == ["grows"] and not driver.outputs["long/0"]
    driver.run()
    driver.assert_done("grows", "long")
    assert driver.engine.stats().preemptions == 0
    assert driver.outputs["grows/0"] == wanted(200, prompt(10, 1))
    assert driver.outputs["long/0"] == wanted(4, prompt(190))
    assert path(driver, "long") == [("w0", Role.PREFILL), ("w1", Role.DECODE)]


def test_pages_that_are_held_for_a_prefill_elsewhere_go_before_those_of_running_ones() -> None:
    driver = split(pages=18, max_running=4, step_token_budget=16)
    _, decode = ends(driver)
    driver.arrive("grows", prompt(10, 1), 100)
    driver.arrive("grows too", prompt(10, 2), 100)
    driver.arrive("long", prompt(190), 4)
    driver.step_until(lambda: decode.pulls)
    decode_alone(driver, decode, 150)
    assert sorted(driver.finished) == ["grows", "grows too"] and driver.engine.stats().preemptions == 0
    driver.run()
    driver.assert_done("long")


def test_a_decode_waits_for_a_pull_under_way_and_neither_waits_for_ever() -> None:
    """What has come so far cannot be taken back in mid-pull; what arrives is one of two running ones."""
    driver = split(pages=16, max_running=4, step_token_budget=16)
    _, decode = ends(driver)
    driver.arrive("grows", prompt(10, 1), 200)
    driver.arrive("long", prompt(190), 40)
    driver.step_until(lambda: decode.pulls)
    for _ in range(200):
        decode.run_step()
        driver.deliver(decode)
    waits = len(driver.outputs["grows/0"])
    assert waits < 200
    for _ in range(20):
        decode.run_step()
        driver.deliver(decode)
    assert len(driver.outputs["grows/0"]) == waits
    driver.run()
    driver.assert_done("grows", "long")
    assert driver.outputs["grows/0"] == wanted(200, prompt(10, 1))
    assert driver.outputs["long/0"] == wanted(40, prompt(190))


def test_a_handoff_that_gives_way_again_and_again_gets_its_place() -> None:
    """Whenever there is room for it, somebody grows into it; once it is prefilled nobody new is let in."""
    driver = split(pages=16, max_running=4, step_token_budget=16)
    _, decode = ends(driver)
    driver.arrive("grows", prompt(10, 1), 120)
    driver.arrive("long", prompt(190), 4)
    driver.step_until(lambda: decode.pulls)
    number = 0
    while "long" not in driver.finished:
        driver.arrive(f"small{number}", prompt(10, 10 + number), 60)
        number += 1
        decode_alone(driver, decode, 4)
        driver.step()
        assert number < 150, "it gives way for ever"
    driver.run()
    driver.assert_done("grows", "long", *(f"small{n}" for n in range(number)))
