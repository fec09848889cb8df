"""The index of who holds which KV unit, across cells and schedulers' lives: its port, its records, their encoding.

The twin (prefix_twin.py) is what a scheduler knows of its own workers; this is what everybody may know. It is advice: a
worker that is asked for a unit it no longer holds says so, and the unit is computed again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Protocol, TypeAlias

from kvstore.prefix_twin import TierPrefix
from wire.ids import Epoch, UnitHash, WorkerId
from wire.plan import Tier

UNIT_HASH_BYTES: Final = 32

Tiers: TypeAlias = tuple[Tier, ...]
"""Where one worker holds one unit, fastest first; empty: nowhere."""

_LETTERS: Final = {Tier.DEVICE: b"d", Tier.HOST: b"h", Tier.DISK: b"k", Tier.REDIS: b"r"}
TIERS_OF: Final[dict[bytes, Tiers]] = {
    b"".join(_LETTERS[tier] for tier in tiers): tiers for n in range(1, 5) for tiers in combinations(Tier, n)
}
"""Every value a unit may have in the index → its tiers. Any other is not ours, and says nothing."""
VALUE_OF: Final[dict[Tiers, bytes]] = {tiers: value for value, tiers in TIERS_OF.items()}


@dataclass(frozen=True, slots=True)
class Holder:
    """One life of a worker's KV. What an earlier epoch held says nothing about a later one."""

    worker_id: WorkerId
    epoch: Epoch


class PrefixIndex(Protocol):
    """Every call may raise what its store raises when it is away."""

    async def lookup(self, chain: Sequence[UnitHash], holders: Sequence[Holder]) -> dict[Holder, TierPrefix]:
        """The prefix of the chain that each of these holds; who lacks its first unit is left out."""
        ...

    async def write(self, holder: Holder, units: Mapping[UnitHash, Tiers], *, anew: bool = False) -> bool:
        """Say where the holder holds these units now. anew: and no others; what was known of it is dropped at once.

        Returns whether anything was known of it before: False to a writer that wrote before means that its entries
        lapsed. Raises FenceLost when another scheduler is active.
        """
        ...

    async def drop(self, holder: Holder) -> None:
        """Forget everything of it. Raises FenceLost when another scheduler is active."""
        ...

    def units(self, holder: Holder) -> AsyncIterator[dict[UnitHash, Tiers]]:
        """All it holds, in bounded slices; a unit may come twice, and one that changes meanwhile may or may not be
        there. For the audit."""
        ...
