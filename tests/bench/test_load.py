"""When requests are sent, and to whom."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import pytest

from bench.load import closed_loop, open_loop, poisson_arrivals
from bench.measure import Outcome, Result

TIMEOUT_S = 10.0


class Sends:
    """Answers when the test's gate opens; keeps the order of sends."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.sent: list[tuple[int, int]] = []
        self.due_s: list[float | None] = []
        self.gate = asyncio.Event()
        self.open_at: int | None = None
        self.running = 0
        self.most_running = 0
        self.mixed = False
        self._running_targets: list[int] = []
        self._clock = clock

    async def __call__(self, target: int, index: int, due_s: float | None) -> Outcome:
        self.sent.append((target, index))
        self.due_s.append(due_s)
        self._running_targets.append(target)
        self.mixed |= len(set(self._running_targets)) > 1
        self.most_running = max(self.most_running, len(self._running_targets))
        if len(self.sent) == self.open_at:
            self.gate.set()
        await self.gate.wait()
        await asyncio.sleep(0)
        self._running_targets.remove(target)
        now_s = self._clock()
        return Outcome(now_s if due_s is None else due_s, now_s, now_s, Result.OK)


def test_poisson_arrivals_are_seeded_ordered_and_have_their_rate() -> None:
    arrivals_s = poisson_arrivals(50.0, 5000, seed=3)
    assert arrivals_s == poisson_arrivals(50.0, 5000, seed=3) != poisson_arrivals(50.0, 5000, seed=4)
    assert arrivals_s == sorted(arrivals_s)
    gaps_s = [b - a for a, b in zip([0.0, *arrivals_s], arrivals_s, strict=False)]
    assert statistics.mean(gaps_s) == pytest.approx(1 / 50, rel=0.1)
    assert statistics.stdev(gaps_s) == pytest.approx(1 / 50, rel=0.1), "exponential gaps: deviation = mean"


async def test_open_loop_arrivals_do_not_wait_for_answers() -> None:
    sends = Sends()
    sends.open_at = 20  # nothing is answered before the last was sent: waiting for one answer would wait for ever
    arrivals_s = [0.001 * i for i in range(20)]
    async with asyncio.timeout(TIMEOUT_S):
        (run,) = await open_loop(sends, arrivals_s, 1, max_in_flight=100, clock=time.perf_counter)
    assert sends.sent == [(0, i) for i in range(20)]
    assert sends.most_running == 20 and len(run.outcomes) == 20
    due_s = [d for d in sends.due_s if d is not None]
    assert [d - due_s[0] for d in due_s] == pytest.approx(arrivals_s), "due when planned, however late it was sent"


async def test_open_loop_drops_and_counts_what_is_over_its_bound() -> None:
    sends = Sends()
    sends.open_at = 3
    opener = asyncio.create_task(sends.gate.wait())
    (run,) = await open_loop(sends, [0.0] * 5, 1, max_in_flight=3, clock=time.perf_counter)
    await opener
    assert sends.sent == [(0, 0), (0, 1), (0, 2)]
    assert [o.result for o in run.outcomes].count(Result.DROPPED) == 2 and len(run.outcomes) == 5


async def test_open_loop_gives_two_targets_the_same_arrivals_interleaved() -> None:
    sends = Sends()
    sends.gate.set()
    arrivals_s = [0.002 * i for i in range(1, 11)]
    runs = await open_loop(sends, arrivals_s, 2, max_in_flight=100, clock=time.perf_counter)
    assert sends.sent == [(target, index) for index in range(10) for target in (0, 1)]
    first, second = ([d for d, (t, _) in zip(sends.due_s, sends.sent, strict=True) if t == n] for n in (0, 1))
    shifts = [b - a for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    assert shifts == pytest.approx([0.001] * 10)
    assert [len(run.outcomes) for run in runs] == [10, 10]


@pytest.mark.parametrize(("requests", "concurrency", "running"), [(10, 3, 3), (2, 8, 2), (5, 1, 1)])
async def test_closed_loop_keeps_its_clients_busy_and_no_more(requests: int, concurrency: int, running: int) -> None:
    sends = Sends()
    sends.open_at = running
    async with asyncio.timeout(TIMEOUT_S):
        (run,) = await closed_loop(sends, requests, 1, concurrency=concurrency, clock=time.perf_counter)
    assert sends.most_running == running
    assert sends.sent == [(0, i) for i in range(requests)]
    assert len(run.outcomes) == requests and run.duration_s > 0
    assert set(sends.due_s) == {None}


async def test_one_client_compares_request_by_request_and_alternates_who_is_first() -> None:
    sends = Sends()
    sends.gate.set()
    await closed_loop(sends, 3, 2, concurrency=1, clock=time.perf_counter)
    assert sends.sent == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]


async def test_clients_compare_in_waves_so_that_servers_never_compete() -> None:
    sends = Sends()
    sends.gate.set()
    runs = await closed_loop(sends, 5, 2, concurrency=2, clock=time.perf_counter)
    assert [target for target, _ in sends.sent] == [0, 0, 1, 1, 1, 1, 0, 0, 0, 1]
    assert not sends.mixed
    for target in (0, 1):
        assert [index for t, index in sends.sent if t == target] == list(range(5))
    assert [len(run.outcomes) for run in runs] == [5, 5]


async def test_a_comparisons_durations_are_each_ones_own_waves() -> None:
    now_s = 0.0

    async def send(target: int, index: int, due_s: float | None) -> Outcome:
        nonlocal now_s
        now_s += 1.0 if target == 0 else 3.0
        return Outcome(now_s, now_s, now_s, Result.OK)

    runs = await closed_loop(send, 4, 2, concurrency=1, clock=lambda: now_s)
    assert [run.duration_s for run in runs] == [4.0, 12.0]
