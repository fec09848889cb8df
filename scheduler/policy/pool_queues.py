"""A fair queue for each pool of workers by prompt length: who waits for one pool holds up nobody for another. Pure.

A sequence belongs for good to the pools that suited its prompt when it arrived. One that came before any of them had a
worker goes anywhere, and waits in a queue of its own, until such a worker comes: from then on it waits as if it had
just arrived. Tenants are served fairly within a pool; what one was served in another does not count there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TypeAlias

from scheduler.policy.fair_queue import FairQueue
from scheduler.sequence import Sequence
from scheduler.worker_view import WorkerView

Pools: TypeAlias = tuple[tuple[int, int], ...]
"""The ranges of prompt lengths (WorkerInfo) that hold a prompt's: usually one, (0, 0) for any; empty: there is none."""


class PoolQueues:
    def __init__(self) -> None:
        self._queues: dict[Pools, FairQueue] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence once, in no useful order."""
        return (seq for queue in self._queues.values() for seq in queue)

    @property
    def waiting_tokens(self) -> int:
        """Of all sequences that wait."""
        return sum(queue.waiting_tokens for queue in self._queues.values())

    def heads(self) -> list[FairQueue]:
        """The queues in which somebody waits: each has one to admit next. Pools may have workers in common: first the
        queue whose head has waited longest, so that none of them starves. A queue in which nobody waits or runs is
        dropped here, and nowhere else: whoever goes through the heads may push to them meanwhile."""
        for pools in [pools for pools, queue in self._queues.items() if queue.is_idle]:
            del self._queues[pools]
        busy = [queue for queue in self._queues.values() if len(queue)]
        return sorted(busy, key=_waits_since) if len(busy) > 1 else busy

    def push(self, seq: Sequence, workers: Collection[WorkerView]) -> None:
        """It arrived."""
        seq.pools = _pools_for(seq, workers)
        self._queues.setdefault(seq.pools, FairQueue()).push(seq)

    def put_back(self, seq: Sequence, workers: Collection[WorkerView]) -> None:
        """A running sequence was taken off its worker. If no pool was for it, it waits for those there are by now;
        those that waited meanwhile were sorted in when a worker came."""
        before = self._queues[seq.pools]
        if not seq.pools:
            seq.pools = _pools_for(seq, workers)
        queue = self._queues.setdefault(seq.pools, FairQueue())
        if queue is before:
            queue.push(seq)  # first: a tenant that is active all the time keeps its counter
            queue.leave(seq)
        else:
            before.leave(seq)  # while its tenant is the one there
            queue.push(seq)

    def sort_in(self, workers: Collection[WorkerView]) -> None:
        """A worker came: have those that no pool was for wait for the pools there are by now."""
        homeless = self._queues.get(())
        if homeless is None or not len(homeless) or not any(_pools_for(seq, workers) for seq in homeless):
            return
        for seq in sorted(homeless.take_all(), key=lambda seq: (seq.request.arrived_order, seq.choice)):
            seq.pools = _pools_for(seq, workers)
            self._queues.setdefault(seq.pools, FairQueue()).push(seq)

    def pop(self, seq: Sequence) -> None:
        """The sequence at its queue's head is admitted: its state says so from now on."""
        self._queues[seq.pools].pop(seq)

    def discard(self, seq: Sequence) -> None:
        """A waiting sequence ended: its state says so already."""
        self._queues[seq.pools].discard(seq)

    def leave(self, seq: Sequence) -> None:
        """A running sequence finished."""
        self._queues[seq.pools].leave(seq)


def _pools_for(seq: Sequence, workers: Collection[WorkerView]) -> Pools:
    return tuple(sorted({w.pool_range for w in workers if w.suits(seq.num_prompt)}))


def _waits_since(queue: FairQueue) -> float:
    head = queue.peek()
    assert head is not None  # somebody waits
    return head.queued_s
