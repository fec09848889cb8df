"""A service's log: a bounded file, the last lines for a failure report, and warnings for the console."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

MAX_FILE_BYTES = 16 << 20
"""The file is moved to NAME.log.1 at this size: two files at most."""
TAIL_LINES = 12
_MAX_LINE_BYTES = 8192
_WARNING = re.compile(rb"^\S+ (WARNING|ERROR|CRITICAL) ")
"""Records of observability.logs that a person should see."""


class ServiceLog:
    """Takes a service's output in pieces of any size."""

    def __init__(self, path: Path, on_warning: Callable[[str], None]) -> None:
        self.path = path
        self._on_warning = on_warning
        self._tail: deque[bytes] = deque(maxlen=TAIL_LINES)
        self._partial = b""
        self._file_failed = False
        self._rotate()
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        try:
            self._write_file(data)
        except OSError as error:  # a full disk must not end the stack
            if not self._file_failed:
                self._on_warning(f"cannot write {self.path}: {error.strerror}")
            self._file_failed = True
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[:_MAX_LINE_BYTES]
        for line in lines:
            self._tail.append(line[:_MAX_LINE_BYTES])
            if _WARNING.match(line):
                self._on_warning(line[:_MAX_LINE_BYTES].decode(errors="replace"))

    def tail(self) -> str:
        """The last lines, indented."""
        lines = [*self._tail, self._partial] if self._partial else list(self._tail)
        return "\n".join(f"    {line.decode(errors='replace')}" for line in lines[-TAIL_LINES:])

    def close(self) -> None:
        self._file.close()

    def _write_file(self, data: bytes) -> None:
        if self._file.tell() + len(data) > MAX_FILE_BYTES:
            self._file.close()
            self._rotate()
            self._file = self.path.open("ab", buffering=0)
        self._file.write(data)

    def _rotate(self) -> None:
        if self.path.exists():
            self.path.replace(self.path.with_name(self.path.name + ".1"))
