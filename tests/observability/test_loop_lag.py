"""A blocked event loop shows in its lag."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import Histogram

from observability.loop_lag import watch_loop_lag

BLOCK_S = 0.06


async def test_a_blocked_event_loop_shows_in_its_lag() -> None:
    seen: asyncio.Queue[float] = asyncio.Queue()

    class Recorder(Histogram):
        def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
            seen.put_nowait(amount)

    watch = asyncio.create_task(watch_loop_lag(Recorder("lag_seconds", "Lag.", registry=None), interval_s=0.001))
    await asyncio.sleep(0)  # the timer is set
    time.sleep(BLOCK_S)  # noqa: ASYNC251  # the fault under test: a call that blocks the loop
    assert await asyncio.wait_for(seen.get(), timeout=5) >= BLOCK_S / 2
    watch.cancel()
    await asyncio.wait([watch])
