"""What the workers may hold, guessed from where sequences were sent: routing without an exact index. Pure.

For comparison, and for workers that say nothing of their caches (PHASEMESH_ROUTING=approximate). A worker is taken to
hold the prompts last sent there, as many units as its pool has room for, least recently sent forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.prefix_twin import PrefixTwin
from scheduler.sequence import Sequence
from scheduler.worker_view import WorkerView
from wire.ids import UNIT_TOKENS, UnitHash, WorkerId
from wire.plan import Tier


class RoutedPrefixes:
    def __init__(self) -> None:
        self._twin = PrefixTwin()
        self._sent: dict[WorkerId, OrderedDict[UnitHash, None]] = {}  # least recently sent first

    def add(self, seq: Sequence, worker: WorkerView) -> None:
        """The sequence was sent there."""
        sent = self._sent.setdefault(worker.worker_id, OrderedDict())
        unit_hashes = seq.unit_hashes()
        for unit_hash in reversed(unit_hashes):  # a prefix is worth keeping longest
            sent[unit_hash] = None
            sent.move_to_end(unit_hash)
        self._twin.add(worker.worker_id, unit_hashes, Tier.DEVICE)
        num_forgotten = max(0, len(sent) - worker.capacity_slots // UNIT_TOKENS)
        forgotten = [sent.popitem(last=False)[0] for _ in range(num_forgotten)]
        self._twin.remove(worker.worker_id, forgotten, Tier.DEVICE)

    def uncached_tokens(self, seq: Sequence) -> dict[WorkerId, int]:
        """Tokens of the sequence that each worker would have to prefill; workers that hold none are left out."""
        prefixes = self._twin.lookup(seq.unit_hashes())
        return {worker_id: len(seq.tokens) - UNIT_TOKENS * prefix.device for worker_id, prefix in prefixes.items()}

    def drop_worker(self, worker_id: WorkerId) -> None:
        self._twin.drop_worker(worker_id)
        self._sent.pop(worker_id, None)
