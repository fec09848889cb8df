"""SIGTERM and SIGINT as events: how a service is told to stop."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StopSignals:
    """The first signal sets `stop`, the next one `hurry`."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    hurry: asyncio.Event = field(default_factory=asyncio.Event)

    def on_signal(self) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


def stop_signals() -> StopSignals:
    """From now on SIGTERM and SIGINT set events of the running loop instead of ending the process."""
    signals = StopSignals()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signals.on_signal)
    return signals
