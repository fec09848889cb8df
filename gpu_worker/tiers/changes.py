"""What entered and left the tiers, told in batches to one listener, so that a twin of their contents is exact.

stores ─ on_change ─▸ contents, and what of it the listener was not told ─ every FLUSH_INTERVAL_S ─▸ listener
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from gpu_worker.tiers.port import OnChange
from wire.ids import UnitHash
from wire.plan import Tier, TierUnits

FLUSH_INTERVAL_S = 0.1
MAX_MESSAGE_UNITS = 16_384
"""Hashes in one TierUnits: half a MiB, below gRPC's limit on a message."""

Listener = Callable[[TierUnits], None]


class ChangeLog:
    """Thread-safe. Stores call on_change under their own locks; the listener must not call back into a store."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._contents: dict[Tier, dict[UnitHash, None]] = {tier: {} for tier in tiers}
        self._untold: dict[Tier, dict[UnitHash, bool]] = {tier: {} for tier in self._contents}
        self._lock = threading.Lock()
        self._telling = threading.Lock()  # taken before _lock: the listener hears things in their order
        self._listener: Listener | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._flush_now_and_then, name="kv-tier-changes", daemon=True)

    def start(self) -> None:
        """Flush every FLUSH_INTERVAL_S from now on, until stop()."""
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def follower(self, tier: Tier) -> OnChange:
        """What one store tells its changes to. A repeat of what is known already changes nothing."""
        contents, untold = self._contents[tier], self._untold[tier]

        def on_change(unit_hash: UnitHash, is_here: bool) -> None:
            with self._lock:
                if (unit_hash in contents) == is_here:
                    return
                if is_here:
                    contents[unit_hash] = None
                else:
                    del contents[unit_hash]
                if untold.pop(unit_hash, None) is None:  # else the listener knows it as it is again
                    untold[unit_hash] = is_here

        return on_change

    def subscribe(self, listener: Listener) -> list[TierUnits]:
        """The contents now. Every later change goes to `listener`, and none to the one before it once this returns."""
        with self._telling, self._lock:
            self._listener = listener
            for untold in self._untold.values():
                untold.clear()
            return self._all()

    def contents(self) -> list[TierUnits]:
        """The contents now; the listener goes on listening."""
        with self._lock:
            return self._all()

    def _all(self) -> list[TierUnits]:
        return [
            part for tier, contents in self._contents.items() for part in _messages(tier, dict.fromkeys(contents, True))
        ]

    def flush(self) -> None:
        """Tell the listener, at most one message a tier unless there are more than MAX_MESSAGE_UNITS changes."""
        with self._telling:
            if self._listener is None:
                return
            with self._lock:
                parts = [part for tier, untold in self._untold.items() for part in _messages(tier, untold)]
                for untold in self._untold.values():
                    untold.clear()
            for part in parts:
                self._listener(part)

    def _flush_now_and_then(self) -> None:
        while not self._stopping.wait(FLUSH_INTERVAL_S):
            self.flush()


def _messages(tier: Tier, changes: dict[UnitHash, bool]) -> list[TierUnits]:
    hashes = list(changes)
    messages = []
    for start in range(0, len(hashes), MAX_MESSAGE_UNITS):
        part = hashes[start : start + MAX_MESSAGE_UNITS]
        messages.append(TierUnits(tier, [h for h in part if changes[h]], [h for h in part if not changes[h]]))
    return messages
