"""Who goes next: fair across tenants by virtual token service, then priority, deadline and arrival within one.

Virtual token counters: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), algorithm 2.
Every tenant's counter grows with the service it gets; the waiting tenant with the smallest counter goes next;
a tenant that was idle is lifted to the smallest active counter, so idling earns no credit.
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

_Key = tuple[int, int, float, int, int]
"""(requeued first, priority, deadline, arrival, push): unique, so sequences are never compared."""


@dataclass(slots=True)
class _Tenant:
    service: float = 0.0
    waiting: list[tuple[_Key, Sequence]] = field(default_factory=list)  # heap; may hold stale entries
    num_waiting: int = 0
    num_running: int = 0


class FairQueue:
    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._pushes = 0

    def __len__(self) -> int:
        return sum(t.num_waiting for t in self._tenants.values())

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no useful order."""
        for tenant in self._tenants.values():
            yield from (seq for _, seq in tenant.waiting if seq.state is SeqState.WAITING)

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
        heapq.heappush(tenant.waiting, (key, seq))
        tenant.num_waiting += 1

    def peek(self) -> Sequence | None:
        """The sequence to admit next; None when nothing waits."""
        best: _Tenant | None = None
        for tenant in self._tenants.values():
            if tenant.num_waiting and (best is None or tenant.service < best.service):
                best = tenant
        if best is None:
            return None
        while best.waiting[0][1].state is not SeqState.WAITING:
            heapq.heappop(best.waiting)
        return best.waiting[0][1]

    def pop(self, seq: Sequence) -> None:
        """Take out the sequence that peek() gave; it runs now."""
        tenant = self._tenants[seq.request.spec.tenant]
        popped = heapq.heappop(tenant.waiting)
        assert popped[1] is seq
        tenant.num_waiting -= 1
        tenant.num_running += 1

    def discard(self, seq: Sequence) -> None:
        """A waiting sequence ended; its heap entry is skipped later. Call after its state changed."""
        name = seq.request.spec.tenant
        tenant = self._tenants[name]
        tenant.num_waiting -= 1
        if len(tenant.waiting) > 2 * tenant.num_waiting + 64:
            tenant.waiting = [entry for entry in tenant.waiting if entry[1].state is SeqState.WAITING]
            heapq.heapify(tenant.waiting)
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
