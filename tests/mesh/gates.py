"""Gates: points in a worker process where a thread waits until the test has done what it came for, kill -9 say.

    with stack.gate(target, "layer-12") as gate:          # closed
        …                                                 # begin what will come to it
        await gate.reached()                              # a thread of that worker waits there
        source.kill()
                                                          # open

A gate is a file, so that it outlives every process but the test's; gated_worker.py says which points there are.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from types import TracebackType

HELD_S = 60.0
"""Longer than any test needs: a thread whose test is gone goes on."""
POLL_S = 0.002

_counting = threading.Lock()


class Gate:
    """The test's side of one gate: closed inside the block, but for those that come first."""

    def __init__(self, directory: Path, point: str, lets_pass: int = 0) -> None:
        self._point = point
        self._lets_pass = lets_pass
        self._closed = directory / point
        self._reached = directory / f"{point}.reached"

    def __enter__(self) -> Gate:
        self._reached.unlink(missing_ok=True)
        self._closed.write_text(str(self._lets_pass))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()

    def open(self) -> None:
        """Whoever waits goes on, and nobody waits any more."""
        self._closed.unlink(missing_ok=True)

    @property
    def is_reached(self) -> bool:
        """A thread waits, or has waited."""
        return self._reached.exists()

    async def reached(self, timeout_s: float = 30.0) -> None:
        """Until a thread waits."""
        deadline_s = time.monotonic() + timeout_s
        while not self.is_reached:
            assert time.monotonic() < deadline_s, f"nobody came to the gate {self._point}"
            await asyncio.sleep(POLL_S)


def pass_gate(directory: Path, point: str) -> None:
    """The worker's side: wait in this thread while the gate is closed."""
    closed = directory / point
    with _counting:
        try:
            lets_pass = int(closed.read_text() or 0)
        except FileNotFoundError:
            return
        if lets_pass:
            closed.write_text(str(lets_pass - 1))
            return
    (directory / f"{point}.reached").touch()
    deadline_s = time.monotonic() + HELD_S
    while closed.exists() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
