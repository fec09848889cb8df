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
from collections.abc import Callable, Iterator
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


@dataclass(slots=True, eq=False)
class Tenant:
    """`service` is its counter: it only grows."""

    name: str
    number: int
    """Counts tenants; decides between equal counters."""
    service: float = 0.0
    waiting: _Heap = field(default_factory=_Heap)
    num_waiting: int = 0
    num_running: int = 0

    @property
    def is_active(self) -> bool:
        return bool(self.num_waiting or self.num_running)


class _ByService:
    """Tenants that are members, by their counter. An entry may be late, since counters only grow: it is put right, or
    dropped, when it comes to the top."""

    def __init__(self, is_member: Callable[[Tenant], bool]) -> None:
        self._is_member = is_member
        self._entries: list[tuple[float, int, Tenant]] = []
        self._entered: set[Tenant] = set()

    def enter(self, tenant: Tenant) -> None:
        if tenant not in self._entered:
            self._entered.add(tenant)
            heapq.heappush(self._entries, (tenant.service, tenant.number, tenant))

    def first(self) -> Tenant | None:
        """The member with the smallest counter."""
        while self._entries:
            service, number, tenant = self._entries[0]
            if not self._is_member(tenant):
                heapq.heappop(self._entries)
                self._entered.remove(tenant)
            elif service < tenant.service:
                heapq.heapreplace(self._entries, (tenant.service, number, tenant))
            else:
                return tenant
        return None


class FairQueue:
    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._num_tenants = 0  # ever made
        self._with_waiting = _ByService(lambda tenant: tenant.num_waiting > 0)
        self._active = _ByService(lambda tenant: tenant.is_active)
        self._by_age = _Heap()
        self._num_waiting = 0
        self._pushes = 0
        self._pops = 0
        self.waiting_tokens = 0
        """Of all sequences that wait."""

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence once, in no useful order."""
        return iter({seq.seq_id: seq for seq in self._by_age.waiting()}.values())

    @property
    def is_idle(self) -> bool:
        """Nobody waits, nobody runs, and so nobody's counter is kept."""
        return not self._tenants

    def push(self, seq: Sequence) -> None:
        """Queue a sequence; one that was running before goes to the front of its tenant's queue."""
        spec = seq.request.spec
        tenant = self._tenant(spec.tenant)
        if not tenant.is_active:
            tenant.service = max(tenant.service, self._smallest_active_service())
        self._pushes += 1
        deadline = inf if spec.deadline_s is None else spec.deadline_s
        order = seq.request.arrived_order
        front: _Key = (0, 0, 0.0, order, self._pushes)
        key = front if seq.requeued else (1, -spec.priority, deadline, order, self._pushes)
        seq.tenant = tenant
        tenant.num_waiting += 1
        self._num_waiting += 1
        self.waiting_tokens += len(seq.tokens)
        tenant.waiting.push(key, seq, tenant.num_waiting)
        self._by_age.push(front, seq, self._num_waiting)
        self._with_waiting.enter(tenant)
        self._active.enter(tenant)

    def peek(self) -> Sequence | None:
        """The sequence to admit next; None when nothing waits."""
        if not self._num_waiting:
            return None
        if self._pops % OLDEST_EVERY == OLDEST_EVERY - 1:
            return self._by_age.first()
        tenant = self._with_waiting.first()
        assert tenant is not None  # somebody waits
        return tenant.waiting.first()

    def pop(self, seq: Sequence) -> None:
        """The sequence that peek() gave is admitted: its state says so from now on."""
        tenant = _tenant_of(seq)
        tenant.num_waiting -= 1
        tenant.num_running += 1
        self._num_waiting -= 1
        self.waiting_tokens -= len(seq.tokens)
        self._pops += 1

    def discard(self, seq: Sequence) -> None:
        """A waiting sequence ended: its state says so already."""
        tenant = _tenant_of(seq)
        tenant.num_waiting -= 1
        self._num_waiting -= 1
        self.waiting_tokens -= len(seq.tokens)
        self._forget_if_idle(tenant)

    def take_all(self) -> list[Sequence]:
        """Whoever waits is to wait elsewhere; in no useful order. What runs is still counted here."""
        waiting = list(self)
        self._by_age = _Heap()
        for seq in waiting:
            _tenant_of(seq).waiting = _Heap()
            self.discard(seq)
        return waiting

    def leave(self, seq: Sequence) -> None:
        """A running sequence finished, or was taken off its worker (then push it first)."""
        tenant = _tenant_of(seq)
        tenant.num_running -= 1
        self._forget_if_idle(tenant)

    def _tenant(self, name: str) -> Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            self._num_tenants += 1
            tenant = self._tenants[name] = Tenant(name, self._num_tenants)
        return tenant

    def _smallest_active_service(self) -> float:
        tenant = self._active.first()
        return tenant.service if tenant is not None else 0.0

    def _forget_if_idle(self, tenant: Tenant) -> None:
        """Bound the table: an idle tenant is kept only while it is ahead of an active one."""
        if tenant.is_active:
            return
        first = self._active.first()
        if first is None:
            self._tenants.clear()
        elif tenant.service <= first.service:
            del self._tenants[tenant.name]


def charge(seq: Sequence, tokens: float) -> None:
    """Add weighted tokens of service to the tenant of a running sequence."""
    _tenant_of(seq).service += tokens


def _tenant_of(seq: Sequence) -> Tenant:
    assert seq.tenant is not None  # it was pushed
    return seq.tenant
