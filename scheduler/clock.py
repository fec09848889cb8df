"""The engine's clock: unix seconds that never jump."""

from __future__ import annotations

import time


class Clock:
    """Unix seconds at construction, advanced by the monotonic clock: a stepped system clock moves no deadline."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset_s + time.monotonic()


def unix_ns(time_s: float) -> int:
    """A time of this clock, as spans want it."""
    return int(time_s * 1e9)
