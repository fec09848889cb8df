"""What KV transfer asks of its neighbours: a worker's pages, its tiers below them, and whoever carries a pull out.

A unit is K and V of 16 consecutive tokens in all layers, named by its hash. A page holds page_size / 16 of them, so
workers with different page sizes exchange units all the same. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wire.ids import PageId, UnitHash
from wire.plan import KvPull, PageUnits, PullReport, Tier, TierUnits

Bytes: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class UnitPlace:
    """Unit `index` of a page: its slots [index * 16, (index + 1) * 16)."""

    page_id: PageId
    index: int


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How a worker stores KV. Equal formats store the same unit in the same bytes."""

    dtype: str
    """Of the stored rows, as in the model card."""
    num_layers: int
    num_kv_heads: int
    row_size: int
    """Stored elements of one token and KV head."""
    element_bytes: int
    unit_tokens: int

    @property
    def unit_layer_bytes(self) -> int:
        """K, or V, of one unit in one layer: [unit_tokens, num_kv_heads, row_size]."""
        return self.unit_tokens * self.num_kv_heads * self.row_size * self.element_bytes

    @property
    def unit_bytes(self) -> int:
        """K and V of one unit in all layers."""
        return 2 * self.num_layers * self.unit_layer_bytes

    def difference(self, other: KvFormat) -> str | None:
        """The first field in which `other` differs, with both values; None: KV may be exchanged as it lies."""
        for f in fields(self):
            ours: Any = getattr(self, f.name)
            theirs: Any = getattr(other, f.name)
            if ours != theirs:
                return f"{f.name}: {ours} here, {theirs} there"
        return None


class Generations(Protocol):
    """One number for each page."""

    def __len__(self) -> int: ...

    def __getitem__(self, page: int, /) -> int: ...

    def __setitem__(self, page: int, generation: int, /) -> None: ...


class KvPages(Protocol):
    """The KV pages of one worker. Every method may be called from any thread, beside the steps.

    Nothing here knows whether a page may be read or written now: that is Residency's, and the scheduler's.
    """

    @property
    def format(self) -> KvFormat: ...

    @property
    def unit_bytes(self) -> int:
        """K and V of one unit in all layers."""
        ...

    @property
    def generations(self) -> Generations:
        """Of each page: counted up by Residency before the page gets a new owner. Shared memory, where the pages
        themselves are."""
        ...

    def read(self, layer: int, places: Sequence[UnitPlace]) -> Bytes:
        """A copy of one layer of units: [len(places), 2 (K, V), unit_layer_bytes]."""
        ...

    def pieces(self, layer: int, places: Sequence[UnitPlace]) -> list[Bytes]:
        """One layer of units, [2 (K, V), len(places), unit_layer_bytes] in contiguous pieces: to be copied, perhaps the
        pages themselves."""
        ...

    def write(self, layer: int, places: Sequence[UnitPlace], data: Bytes) -> None:
        """Store one layer of units, as `read` gave it; done when this returns."""
        ...


class LowerTiers(Protocol):
    """Units below the pages, each a value of its own, by hash. Every method may be called from any thread."""

    def save(self, pages: Sequence[PageUnits]) -> None:
        """These pages are about to be given to somebody else: keep what is worth keeping of their units. Called by the
        compute thread, which waits; the pages are not written before this returns."""
        ...

    def find(self, unit_hashes: Sequence[UnitHash]) -> list[Tier]:
        """Where each of the leading units that are here lies; ends with the first that is in no tier."""
        ...

    def read(self, unit_hash: UnitHash) -> Bytes | None:
        """One unit in all layers, checked: [num_layers, 2, unit_layer_bytes]. None: it is gone, or was damaged."""
        ...

    def contents(self) -> list[TierUnits]:
        """What is here now; whoever listens goes on listening."""
        ...

    def subscribe(self, listener: Callable[[TierUnits], None]) -> list[TierUnits]:
        """What is here now; every later change goes to `listener`, in order, and no longer to the one before it."""
        ...

    def clear(self) -> None:
        """A step failed: nothing this worker computed is to be trusted."""
        ...


class RunningPull(Protocol):
    """A pull under way."""

    @property
    def is_over(self) -> bool:
        """Its last report was given."""
        ...

    def cancel(self) -> None:
        """End soon: its report comes all the same. Harmless when it is over."""
        ...

    def wait(self) -> None:
        """Until its last report was given: from then on it touches no page."""
        ...


class Puller(Protocol):
    """Carries pulls out in threads of its own, a bounded number at once, begun in the order they came."""

    def begin(self, pull: KvPull, places: Sequence[UnitPlace], report: Callable[[PullReport], None]) -> RunningPull:
        """Bring pull.unit_hashes[i] to places[i]. Returns at once.

        `report` is called from another thread: now and then without `done` while units come, and once with it, when
        nothing will write to these places any more. Whatever goes wrong is said there; this raises nothing.
        """
        ...


def unit_places(pages: Sequence[PageId], num_units: int, page_size: int, unit_tokens: int) -> list[UnitPlace]:
    """Places of the first units of consecutive pages of a chain."""
    per_page = page_size // unit_tokens
    return [UnitPlace(pages[i // per_page], i % per_page) for i in range(num_units)]
