"""The prefix index in this process's memory: for tests, and for whatever runs without Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from kvstore.prefix_index import Holder, Tiers
from kvstore.prefix_twin import PrefixTwin, TierPrefix
from wire.ids import UnitHash, WorkerId
from wire.plan import Tier


class MemoryPrefixIndex:
    """A PrefixIndex. Nothing lapses here."""

    def __init__(self) -> None:
        self._twin = PrefixTwin()

    async def lookup(self, chain: Sequence[UnitHash], holders: Sequence[Holder]) -> dict[Holder, TierPrefix]:
        found = self._twin.lookup(chain)
        return {holder: found[_name(holder)] for holder in holders if _name(holder) in found}

    async def write(self, holder: Holder, units: Mapping[UnitHash, Tiers], *, anew: bool = False) -> bool:
        name = _name(holder)
        was_known = self._twin.count(name) > 0
        if anew:
            self._twin.drop_worker(name)
        for tier in Tier:
            self._twin.add(name, [unit_hash for unit_hash, tiers in units.items() if tier in tiers], tier)
            self._twin.remove(name, [unit_hash for unit_hash, tiers in units.items() if tier not in tiers], tier)
        return was_known

    async def drop(self, holder: Holder) -> None:
        self._twin.drop_worker(_name(holder))

    async def units(self, holder: Holder) -> AsyncIterator[dict[UnitHash, Tiers]]:
        name = _name(holder)
        held = set().union(*self._twin.units(name).values())
        if held:
            yield {unit_hash: self._twin.tiers(name, unit_hash) for unit_hash in held}


def _name(holder: Holder) -> WorkerId:
    return WorkerId(f"{holder.epoch}:{holder.worker_id}")
