"""The port of a store below the device, and what its users must know to read from one.

A store holds encoded units (unit_codec.py) by hash and believes nothing of their bytes: its reader checks them.
Imports nothing that does I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

from wire.ids import UnitHash
from wire.plan import Tier


class StoredUnit:
    """A unit's encoded bytes, valid until released; `with unit: …` releases."""

    def __init__(self, encoded: memoryview, on_release: Callable[[], None] | None = None) -> None:
        self.encoded = encoded
        self._on_release = on_release

    def release(self) -> None:
        """Once; repeating is harmless."""
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()

    def __enter__(self) -> StoredUnit:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


def shares(unit: StoredUnit, count: int) -> list[StoredUnit]:
    """`count` handles on one unit, which is released with the last of them."""
    lock = threading.Lock()
    left = count

    def released() -> None:
        nonlocal left
        with lock:
            left -= 1
            is_last = left == 0
        if is_last:
            unit.release()

    return [StoredUnit(unit.encoded, released) for _ in range(count)]


class UnitStore(Protocol):
    """Thread-safe. What it holds changes by put, drop, its budget and its TTL; every change is told to on_change."""

    @property
    def tier(self) -> Tier: ...

    def get(self, unit_hash: UnitHash) -> StoredUnit | None:
        """None: it is not here, or cannot be had now. Never raises for I/O, never waits for long."""
        ...

    def holds(self, unit_hashes: Sequence[UnitHash]) -> list[bool]:
        """Whether each can be had, as far as is known."""
        ...

    def drop(self, unit_hash: UnitHash) -> None:
        """Forget a unit, if it is here."""
        ...

    def clear(self) -> None:
        """Nothing this worker stored is to be trusted: from now on none of it can be read."""
        ...

    def contents(self) -> list[UnitHash]:
        """Everything held."""
        ...

    @property
    def num_units(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


class LowerStore(UnitStore, Protocol):
    """A store that write_behind.py feeds with what the host evicts."""

    def put(self, unit_hash: UnitHash, encoded: memoryview) -> bool:
        """Hold a unit; one that is held already costs little. False: it could not be stored, for whatever reason."""
        ...

    def upkeep(self) -> None:
        """Let go of what is too old, or no longer wanted; called now and then, by the thread that puts."""
        ...

    def close(self) -> None: ...


OnChange = Callable[[UnitHash, bool], None]
"""(unit hash, whether it is here from now on): under the store's lock, in the order in which it happened."""


def ignore_change(unit_hash: UnitHash, is_here: bool) -> None:
    """For a store whose changes nobody follows."""
