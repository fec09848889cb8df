"""Progress for people and for logs: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

BAR_WIDTH = 30
LINE_EVERY_S = 5.0
"""Without a terminal, a running download says how far it is this often."""


class Bar:
    """One running transfer; sizes are bytes."""

    def __init__(self, out: TextIO, label: str, total: int) -> None:
        self._out = out
        self._label = label
        self._total = total
        self._tty = out.isatty()
        self._last_line_s = time.monotonic()

    def update(self, done: int) -> None:
        done = min(done, self._total)
        now = time.monotonic()
        if self._tty:
            filled = BAR_WIDTH * done // self._total
            bar = "█" * filled + "░" * (BAR_WIDTH - filled)
            print(f"\r{self._label} {bar} {_megabytes(done, self._total)}", end="", file=self._out, flush=True)
        elif now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            print(f"{self._label}: {_megabytes(done, self._total)}", file=self._out, flush=True)

    def end_line(self) -> None:
        if self._tty:
            print(file=self._out, flush=True)


def _megabytes(done: int, total: int) -> str:
    return f"{done / 1e6:.0f} of {total / 1e6:.0f} MB"


class Progress:
    """Where progress goes; stderr unless told otherwise."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr

    def line(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Bar]:
        bar = Bar(self._out, label, total)
        if not self._out.isatty():
            self.line(f"{label} ({total / 1e6:.0f} MB)")
        try:
            yield bar
            bar.update(total)
        finally:
            bar.end_line()
