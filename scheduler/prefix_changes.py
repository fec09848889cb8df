"""What the workers of a cell hold, told to the twin at once and to the index in Redis by command. Pure.

The twin and the index say what each worker holds, and end with its session; `shared` says what lies in Redis for all.

Only computed units are told: a unit is findable on its own worker from dispatch, elsewhere from the report on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from kvstore.prefix_twin import PrefixTwin
from scheduler.commands import UpdateIndex
from scheduler.events import ResidencyAudited
from scheduler.shared_units import SharedUnits
from scheduler.worker_view import WorkerView
from wire.ids import UnitHash
from wire.plan import Tier, TierUnits


class PrefixChanges:
    def __init__(self) -> None:
        self.twin = PrefixTwin()
        self.shared = SharedUnits()

    def worker_up(self, worker: WorkerView, tiers: Iterable[TierUnits], now: float) -> list[UpdateIndex]:
        """A session began: what the twin and the index had of this worker is void."""
        self.worker_down(worker)
        return [self.pages_changed(worker, fresh=True), *(self.tier_changed(worker, units, now) for units in tiers)]

    def worker_down(self, worker: WorkerView) -> None:
        """It cannot be asked for its KV any more; what it stored in Redis lies there for the others."""
        self.twin.drop_worker(worker.worker_id)

    def worker_failed(self, worker: WorkerView) -> None:
        """A step raised: nothing it computed is to be trusted, wherever it lies. Call it before worker_down."""
        self.shared.void(worker.info, self.twin.units(worker.worker_id)[Tier.REDIS])

    def pages_changed(self, worker: WorkerView, *, fresh: bool = False) -> UpdateIndex:
        """What came into the worker's pages, and what went, since the last call."""
        changes = worker.pool.take_changes()
        stored = [unit_hash for unit_hash, is_there in changes.items() if is_there]
        dropped = [unit_hash for unit_hash, is_there in changes.items() if not is_there]
        return self._changed(worker, Tier.DEVICE, stored, dropped, fresh=fresh)

    def tier_changed(self, worker: WorkerView, units: TierUnits, now: float) -> UpdateIndex:
        """The worker said so."""
        if units.tier is Tier.REDIS and worker.info.shared_tier is not None:
            self.shared.changed(worker.info.shared_tier, units, now)
        return self._changed(worker, units.tier, units.stored, units.dropped)

    def audited(self, worker: WorkerView, audit: ResidencyAudited, now: float) -> list[UpdateIndex]:
        """The worker holds other units than the twin says, and did so one audit ago: a unit too many on either side is
        given up on both. To adopt one would be to trust a page that may have been written since."""
        pool = worker.pool
        wrong = audit.differing.get(Tier.DEVICE, frozenset())
        pages = {page for unit_hash in wrong for page in pool.pages_with(unit_hash)}
        pages |= {page.page_id for page in audit.pages if not wrong.isdisjoint(page.unit_hashes)}
        for page in sorted(pages):
            pool.withdraw(page)
            if pool.is_free(page):  # else the next audit finds it again
                worker.pending_forgets.append(page)
        held: defaultdict[Tier, set[UnitHash]] = defaultdict(set)
        for units in audit.tiers:
            held[units.tier].update(units.stored)
        return [
            self.tier_changed(worker, TierUnits(tier, list(units & held[tier]), list(units - held[tier])), now)
            for tier, units in audit.differing.items()
            if tier is not Tier.DEVICE
        ]

    def _changed(
        self, worker: WorkerView, tier: Tier, stored: list[UnitHash], dropped: list[UnitHash], *, fresh: bool = False
    ) -> UpdateIndex:
        self.twin.remove(worker.worker_id, dropped, tier)
        self.twin.add(worker.worker_id, stored, tier)
        return UpdateIndex(worker.worker_id, worker.epoch, tier, stored, dropped, fresh)
