"""What lies below a PagedWorker's pages: a host tier of its own, and a Redis tier that all of them share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from wire.ids import UnitHash
from wire.plan import SharedTier, Tier, TierUnits

Unit: TypeAlias = "list[int | None]"
"""The digests in a unit's slots."""


@dataclass
class PagedRedis:
    """The cell's: what was stored first goes first."""

    max_units: int
    layout: str = "layout"
    ttl_ms: int = 600_000
    """Told; nothing here lapses."""
    units: OrderedDict[UnitHash, Unit] = field(default_factory=OrderedDict)

    @property
    def shared_tier(self) -> SharedTier:
        return SharedTier(self.layout, self.max_units, self.ttl_ms)

    def store(self, unit_hash: UnitHash, unit: Unit) -> None:
        self.units.setdefault(unit_hash, unit)
        if len(self.units) > self.max_units:
            self.units.popitem(last=False)


class PagedTiers:
    """One worker's: the host holds so many units, and what it evicts goes to Redis, where there is one."""

    def __init__(self, host_units: int, redis: PagedRedis | None) -> None:
        self._host_units = host_units
        self._host: OrderedDict[UnitHash, Unit] = OrderedDict()
        self._redis = redis
        self._in_redis = set() if redis is None else set(redis.units)
        """What this worker stored there, or found at start."""
        self._told: dict[Tier, set[UnitHash]] = {Tier.HOST: set(), Tier.REDIS: set(self._in_redis)}

    def save(self, units: Mapping[UnitHash, Unit]) -> None:
        """Their page gets a new owner."""
        if not self._host_units:
            return
        self._host.update(units)
        while len(self._host) > self._host_units:
            unit_hash, unit = self._host.popitem(last=False)
            if self._redis is not None:
                self._redis.store(unit_hash, unit)
                self._in_redis.add(unit_hash)

    def changes(self) -> list[TierUnits]:
        """Since the last call; what others pushed out of Redis is noticed here."""
        now = self._held()
        changes = [
            TierUnits(tier, sorted(held - self._told[tier]), sorted(self._told[tier] - held))
            for tier, held in now.items()
            if held != self._told[tier]
        ]
        self._told = now
        return changes

    def contents(self) -> list[TierUnits]:
        return [TierUnits(tier, sorted(held)) for tier, held in self._held().items() if held]

    def get(self, unit_hash: UnitHash) -> Unit | None:
        unit = self._host.get(unit_hash)
        return unit if unit is not None or self._redis is None else self._redis.units.get(unit_hash)

    def _held(self) -> dict[Tier, set[UnitHash]]:
        if self._redis is not None:
            self._in_redis &= self._redis.units.keys()
        return {Tier.HOST: set(self._host), Tier.REDIS: set(self._in_redis)}
