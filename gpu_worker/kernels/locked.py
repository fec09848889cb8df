"""A lock between processes of one host that make the same file."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold `target` + ".lock" (made with its folder); ends with its holder, however that dies. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
