"""Lower tiers in a dictionary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gpu_worker.transfer.port import Bytes, KvPages, UnitPlace
from wire.ids import UnitHash
from wire.plan import PageUnits, Tier, TierUnits


class FakeTiers:
    """Implements gpu_worker.transfer.port.LowerTiers; keeps everything, in host memory."""

    def __init__(self, kv: KvPages | None) -> None:
        assert kv is not None
        self._kv = kv
        self.units: dict[UnitHash, Bytes] = {}
        self.unreadable: set[UnitHash] = set()
        self._listener: Callable[[TierUnits], None] = lambda units: None

    def save(self, pages: Sequence[PageUnits]) -> None:
        stored = []
        for page in pages:
            places = [UnitPlace(page.page_id, index) for index in range(len(page.unit_hashes))]
            layers = np.stack([self._kv.read(layer, places) for layer in range(self._kv.format.num_layers)])
            for index, unit_hash in enumerate(page.unit_hashes):
                self.units[unit_hash] = layers[:, index].copy()
                stored.append(unit_hash)
        self._listener(TierUnits(Tier.HOST, stored))

    def find(self, unit_hashes: Sequence[UnitHash]) -> list[Tier]:
        tiers = []
        for unit_hash in unit_hashes:
            if unit_hash not in self.units:
                break
            tiers.append(Tier.HOST)
        return tiers

    def read(self, unit_hash: UnitHash) -> Bytes | None:
        return None if unit_hash in self.unreadable else self.units.get(unit_hash)

    def subscribe(self, listener: Callable[[TierUnits], None]) -> list[TierUnits]:
        self._listener = listener
        return [TierUnits(Tier.HOST, list(self.units))] if self.units else []

    def clear(self) -> None:
        self.units.clear()
