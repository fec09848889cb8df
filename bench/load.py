"""When requests are sent. `send(target, index, due_s)` runs one to its end; targets are numbered, one or two.

open loop      requests start at given times, whatever became of the others: a slow server meets the load it earned
closed loop    C clients, each sends its next request when its last has ended

Two targets get the same requests in the same run. Closed loop: in waves of C, one target at a time, so two servers on
one machine never compete; the order alternates (AB BA AB …), so that drift favours neither. Open loop: each gets the
same arrivals, the second half a mean gap later.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from bench.measure import Outcome, Result

Send = Callable[[int, int, float | None], Awaitable[Outcome]]
Clock = Callable[[], float]


@dataclass(slots=True)
class Run:
    """What came of one target's requests, and the seconds it took: the load's own time, without the other's waves."""

    outcomes: list[Outcome] = field(default_factory=list)
    duration_s: float = 0.0


def poisson_arrivals(rate: float, requests: int, seed: int) -> list[float]:
    """Seconds after the start; the first after one gap. `rate` in requests/s."""
    rng = random.Random(f"arrivals {seed}")
    return list(itertools.accumulate(rng.expovariate(rate) for _ in range(requests)))


async def open_loop(
    send: Send, arrivals_s: Sequence[float], targets: int, *, max_in_flight: int, clock: Clock
) -> list[Run]:
    """Start each request at its time. One that finds `max_in_flight` running is dropped, and counted as such."""
    runs = [Run() for _ in range(targets)]
    in_flight = 0

    async def one(target: int, index: int, due_s: float) -> None:
        nonlocal in_flight
        try:
            runs[target].outcomes.append(await send(target, index, due_s))
        finally:
            in_flight -= 1

    started_s = clock()
    async with asyncio.TaskGroup() as tasks:
        for at_s, target, index in _schedule(arrivals_s, targets):
            due_s = started_s + at_s
            # Again where it woke a little early: uvloop's timers round to milliseconds.
            while (left_s := due_s - clock()) > 0:  # noqa: ASYNC110  # waits for a time, not for a state
                await asyncio.sleep(left_s)
            if in_flight >= max_in_flight:
                now_s = clock()
                runs[target].outcomes.append(Outcome(due_s, now_s, now_s, Result.DROPPED, "too many in flight"))
                continue
            in_flight += 1
            tasks.create_task(one(target, index, due_s))
    for run in runs:
        if run.outcomes:
            run.duration_s = max(o.end_s for o in run.outcomes) - min(o.due_s for o in run.outcomes)
    return runs


def _schedule(arrivals_s: Sequence[float], targets: int) -> list[tuple[float, int, int]]:
    """(when, target, index), in order of time."""
    if not arrivals_s:
        return []
    shift_s = arrivals_s[-1] / len(arrivals_s) / targets
    return sorted((at_s + t * shift_s, t, i) for i, at_s in enumerate(arrivals_s) for t in range(targets))


async def closed_loop(send: Send, requests: int, targets: int, *, concurrency: int, clock: Clock) -> list[Run]:
    """One target: C clients without a pause. Two: waves of C, in turn."""
    runs = [Run() for _ in range(targets)]
    size = requests if targets == 1 else concurrency
    for number, first in enumerate(range(0, requests, size)):
        indices = range(first, min(first + size, requests))
        order = range(targets) if number % 2 == 0 else reversed(range(targets))
        for target in order:
            await _clients(send, target, indices, concurrency, runs[target], clock)
    return runs


async def _clients(send: Send, target: int, indices: range, concurrency: int, run: Run, clock: Clock) -> None:
    started_s = clock()
    left = iter(indices)

    async def client() -> None:
        for index in left:  # shared: each index goes to one client
            run.outcomes.append(await send(target, index, None))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(concurrency, len(indices))):
            tasks.create_task(client())
    run.duration_s += clock() - started_s
