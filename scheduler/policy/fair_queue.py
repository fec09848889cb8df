"""Who goes next: fair across tenants by virtual token service, then priority, deadline and arrival within one.

Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2.
Every tenant's counter grows with the service it gets; the waiting tenant with the smallest counter goes next;
a tenant that was idle is lifted to the smallest active counter, so idling earns no credit.

Counters alone let an endless stream of new tenants, or of higher priorities, hold back a sequence for ever. So every
OLDEST_EVERY-th admission goes to whoever arrived first: with n sequences before it by age, nobody waits for more than
OLDEST_EVERY * (n + 1) admissions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from scheduler.sequence import SeqState, Sequence

INPUT_WEIGHT = 1.0
CACHED_WEIGHT = 0.1
OUTPUT_WEIGHT = 2.0
"""Predicted cost of a token relative to one that is prefilled."""
OLDEST_EVERY = 16

_Key = tuple[int, int, float, int, int]
"""(requeued first, priority, deadline, arrival, push): unique, so sequences are never compared."""


class _Heap:
    """Sequences by key. Those that stopped waiting stay until they surface; the heap is rebuilt when they outnumber."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[tuple[_Key, Sequence]] = []

    def push(self, key: _Key, seq: Sequence, num_waiting: int) -> None:
        if len(self._entries) > 2 * num_waiting + 64:
            self._entries = [entry for entry in self._entries if entry[1].state is SeqState.WAITING]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (key, seq))

    def first(self) -> Sequence:
        """The waiting sequence with the smallest key; there is one."""
        while self._entries[0][1].state is not SeqState.WAITING:
            heapq.heappop(self._entries)
        return self._entries[0][1]

    def waiting(self) -> Iterator[Sequence]:
        return (seq for _, seq in self._entries if seq.state is SeqState.WAITING)


@dataclass(slots=True)
class _Tenant:
    service: float = 0.0
    waiting: _Heap = field(default_factory=_Heap)
    num_waiting: int = 0
    num_running: int = 0


class FairQueue:
    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._by_age = _Heap()
        self._num_waiting = 0
        self._pushes = 0
        self._pops = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence once, in no useful order."""
        return iter({seq.seq_id: seq for seq in self._by_age.waiting()}.values())

    def push(self, seq: Sequence) -> None:
        """Queue a sequence; one that was running before goes to the front of its tenant's queue."""
        spec = seq.request.spec
        tenant = self._tenants.setdefault(spec.tenant, _Tenant())
        if not tenant.num_waiting and not tenant.num_running:
            tenant.service = max(tenant.service, self._smallest_active_service())
        self._pushes += 1
        deadline = inf if spec.deadline_s is None else spec.deadline_s
        order = seq.request.arrived_order
        front: _Key = (0, 0, 0.0, order, self._pushes)
        key = front if seq.requeued else (1, -spec.priority, deadline, order, self._pushes)
        tenant.num_waiting += 1
        self._num_waiting += 1
        tenant.waiting.push(key, seq, tenant.num_waiting)
        self._by_age.push(front, seq, self._num_waiting)

    def peek(self) -> Sequence | None:
        """The sequence to admit next; None when nothing waits."""
        if not self._num_waiting:
            return None
        if self._pops % OLDEST_EVERY == OLDEST_EVERY - 1:
            return self._by_age.first()
        waiting = [t for t in self._tenants.values() if t.num_waiting]
        return min(waiting, key=lambda tenant: tenant.service).waiting.first()

    def pop(self, seq: Sequence) -> None:
        """The sequence that peek() gave is admitted: its state says so from now on."""
        tenant = self._tenants[seq.request.spec.tenant]
        tenant.num_waiting -= 1
        tenant.num_running += 1
        self._num_waiting -= 1
        self._pops += 1

    def discard(self, seq: Sequence) -> None:
        """A waiting sequence ended: its state says so already."""
        name = seq.request.spec.tenant
        self._tenants[name].num_waiting -= 1
        self._num_waiting -= 1
        self._forget_if_idle(name)

    def leave(self, seq: Sequence) -> None:
        """A running sequence finished, or was taken off its worker (then push it first)."""
        name = seq.request.spec.tenant
        self._tenants[name].num_running -= 1
        self._forget_if_idle(name)

    def charge(self, seq: Sequence, tokens: float) -> None:
        """Add weighted tokens of service to the tenant of a running sequence."""
        self._tenants[seq.request.spec.tenant].service += tokens

    def _active(self) -> list[_Tenant]:
        return [t for t in self._tenants.values() if t.num_waiting or t.num_running]

    def _smallest_active_service(self) -> float:
        return min((t.service for t in self._active()), default=0.0)

    def _forget_if_idle(self, name: str) -> None:
        """Bound the table: an idle tenant is kept only while it is ahead of an active one."""
        tenant = self._tenants[name]
        if tenant.num_waiting or tenant.num_running:
            return
        if not self._active():
            self._tenants.clear()
        elif tenant.service <= self._smallest_active_service():
            del self._tenants[name]
