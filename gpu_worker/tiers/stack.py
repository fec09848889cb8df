"""Host memory, disk and Redis below a worker's pages, as one place for units.

    pages ── save, before a page gets a new owner ──▸ host ── evicted ──▸ disk
      ▴                                                 │            └──▸ Redis
      └────────── read: the fastest that has it ────────┴───────────────────┘

A unit that was read stays where it was (inclusive): it need not be saved again when its page goes, and a pull that
fails has lost nothing. Only units the host lacks are copied out of a page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from gpu_worker.tiers.changes import ChangeLog
from gpu_worker.tiers.host_store import HostStore, OnEvicted
from gpu_worker.tiers.port import StoredUnit, UnitStore, shares
from gpu_worker.tiers.unit_codec import Bytes, UnitCodec, UnitInvalid, tail_first
from gpu_worker.tiers.write_behind import WriteBehind
from gpu_worker.transfer.port import KvPages, UnitPlace
from observability.tier_metrics import TierMetrics
from wire.ids import UnitHash
from wire.plan import PageUnits, SharedTier, Tier, TierUnits

log = logging.getLogger("gpu_worker.tiers")

READ_UNITS = 32
"""Units taken from the pages at once: they lie in memory twice meanwhile."""


class TierStack:
    """Implements gpu_worker.transfer.port.LowerTiers. `open_host(on_evicted)` makes the host's store."""

    def __init__(
        self,
        kv: KvPages,
        codec: UnitCodec,
        open_host: Callable[[OnEvicted], HostStore],
        writers: Sequence[WriteBehind],
        changes: ChangeLog,
        metrics: TierMetrics,
        *,
        shared: SharedTier | None,
    ) -> None:
        """writers: of the stores below the host, fastest first. shared: None without Redis among them."""
        self.shared = shared
        self._kv = kv
        self._codec = codec
        self._writers = writers
        self._host = open_host(self._evicted)
        self._stores: list[UnitStore] = [self._host, *(writer.store for writer in writers)]
        self._changes = changes
        self._metrics = metrics

    def start(self) -> None:
        for writer in self._writers:
            writer.start()
        self._changes.start()

    def stop(self) -> None:
        for writer in self._writers:
            writer.stop()
        self._changes.stop()

    def save(self, pages: Sequence[PageUnits]) -> None:
        """Keep what the host does not have of these pages' units. The compute thread waits for the copies."""
        wanted: list[tuple[UnitHash, UnitPlace]] = []
        for page in pages:
            self._host.touch(page.unit_hashes)
            places = [(h, UnitPlace(page.page_id, index)) for index, h in enumerate(page.unit_hashes)]
            is_held = self._host.holds(page.unit_hashes)
            wanted += tail_first([place for place, held in zip(places, is_held, strict=True) if not held])
        for start in range(0, len(wanted), READ_UNITS):
            self._save_units(wanted[start : start + READ_UNITS])
        self._metrics.set_contents(Tier.HOST, self._host.num_units, self._host.num_bytes)

    def find(self, unit_hashes: Sequence[UnitHash]) -> list[Tier]:
        """Where each of the leading units that are here lies. They count as used."""
        tiers: dict[UnitHash, Tier] = {}
        for store in self._stores:
            missing = [unit_hash for unit_hash in unit_hashes if unit_hash not in tiers]
            found = zip(missing, store.holds(missing), strict=True)
            tiers |= {unit_hash: store.tier for unit_hash, is_held in found if is_held}
        leading = []
        for unit_hash in unit_hashes:
            if unit_hash not in tiers:
                break
            leading.append(tiers[unit_hash])
        self._host.touch(unit_hashes[: len(leading)])
        return leading

    def read(self, unit_hash: UnitHash) -> Bytes | None:
        """[num_layers, 2, unit_layer_bytes], checked, from the fastest tier that has it whole; None: none has."""
        for store in self._stores:
            stored = store.get(unit_hash)
            if stored is None:
                self._metrics.read(store.tier, "miss")
                continue
            with stored:
                try:
                    unit = self._codec.decode(unit_hash, stored.encoded)
                except UnitInvalid as error:
                    log.warning(
                        "a unit is damaged", extra={"tier": store.tier, "unit": unit_hash.hex(), "why": str(error)}
                    )
                    self._metrics.read(store.tier, "damaged")
                    store.drop(unit_hash)
                    continue
            self._metrics.read(store.tier, "hit")
            return unit.reshape(self._kv.format.num_layers, 2, -1)
        return None

    def contents(self) -> list[TierUnits]:
        """What is here now; whoever listens goes on listening."""
        return self._changes.contents()

    def subscribe(self, listener: Callable[[TierUnits], None]) -> list[TierUnits]:
        """What is here now; every later change goes to `listener`, in order, and no longer to the one before it."""
        return self._changes.subscribe(listener)

    def clear(self) -> None:
        """A step failed: nothing this worker computed is to be trusted."""
        self._host.clear()
        for writer in self._writers:
            writer.clear()

    def flush(self, timeout_s: float) -> bool:
        """Wait until the stores below the host have what it evicted so far; False: not within timeout_s each."""
        return all(writer.flush(timeout_s) for writer in self._writers)

    def _save_units(self, wanted: Sequence[tuple[UnitHash, UnitPlace]]) -> None:
        layout = self._kv.format
        units = np.empty((len(wanted), layout.num_layers, 2, layout.unit_layer_bytes), np.uint8)
        places = [place for _, place in wanted]
        for layer in range(layout.num_layers):
            units[:, layer] = self._kv.read(layer, places)
        for (unit_hash, _), unit in zip(wanted, units, strict=True):
            self._save_unit(unit_hash, unit.reshape(-1))

    def _save_unit(self, unit_hash: UnitHash, unit: Bytes) -> None:
        if self._host.put(unit_hash, lambda slot: self._codec.encode(unit_hash, unit, slot)):
            self._metrics.saved(Tier.HOST)
        else:
            self._metrics.dropped(Tier.HOST)

    def _evicted(self, unit_hash: UnitHash, unit: StoredUnit | None) -> None:
        if unit is None:
            for writer in self._writers:
                self._metrics.dropped(writer.store.tier)
            return
        for writer, share in zip(self._writers, shares(unit, len(self._writers)), strict=True):
            writer.offer(unit_hash, share)
