"""How late an event loop runs: the first number to look at when a service is slow for no visible reason."""

from __future__ import annotations

import asyncio

from prometheus_client import Histogram

INTERVAL_S = 0.25


async def watch_loop_lag(lag_s: Histogram, interval_s: float = INTERVAL_S) -> None:
    """Observe, for ever, how many seconds after its due time a timer of interval_s wakes. Run it in a TaskGroup."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        lag_s.observe(max(0.0, loop.time() - due_s))
