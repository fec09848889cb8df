"""`python guard.py`, started beside the children: kills what they started when the launcher is gone, however it went.

It reads `+PGID` and `-PGID` lines from its standard input. End of input means that the launcher ended: whatever
process group is still on the list is killed. An orderly launcher leaves the list empty.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


class Guard:
    """The launcher's end of the pipe."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe

    def watch(self, pgid: int) -> None:
        self._send(f"+{pgid}\n")

    def forget(self, pgid: int) -> None:
        self._send(f"-{pgid}\n")

    def _send(self, line: str) -> None:
        with contextlib.suppress(
            BrokenPipeError
        ):  # somebody killed the guard: the children still have their death signal
            self._pipe.write(line.encode())
            self._pipe.flush()


@contextmanager
def running_guard() -> Iterator[Guard]:
    """Start a guard in a session of its own, out of reach of Ctrl-C."""
    process = subprocess.Popen([sys.executable, "-I", "-S", __file__], stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    try:
        yield Guard(process.stdin)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    groups: set[int] = set()
    for line in sys.stdin:
        pgid = int(line[1:])
        if line[0] == "+":
            groups.add(pgid)
        else:
            groups.discard(pgid)
    for pgid in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pgid, signal.SIGKILL)


if __name__ == "__main__":
    main()
