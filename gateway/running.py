"""Requests in progress, and draining: a stopping gateway refuses new ones and waits for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from wire.errors import Unavailable


class Running:
    """Counts requests from their headers to their last byte."""

    def __init__(self) -> None:
        self.draining = False
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """One request's time. Raises Unavailable when draining."""
        if self.draining:
            raise Unavailable("this gateway is stopping")
        self._count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._count -= 1
            if self._count == 0:
                self._idle.set()

    async def drain(self) -> None:
        """Refuse new requests; return when none is running."""
        self.draining = True
        await self._idle.wait()
