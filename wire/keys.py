"""Every Redis key and every lifetime, in this one file.

Every key carries its cell's hash tag `{cell}`, so all of a cell lies on one slot of a Redis Cluster: a script may touch
several keys, and one node serves the cell (docs/adr/0011). Lifetimes are seconds; a key without one lives until its
owner removes it.
"""

from __future__ import annotations

from wire.ids import Epoch, GatewayId, RequestId, WorkerId

LANES = ("interactive", "batch")
"""Request streams of a cell, drained in this order."""

SCHEDULER_GROUP = "scheduler"
SCHEDULER_CONSUMER = "active"
"""One fixed consumer name: pending entries belong to whoever holds the lease (design §9)."""

SCHEDULER_LEASE_TTL_S = 3.0
WORKER_LEASE_TTL_S = 5.0
GATEWAY_LEASE_TTL_S = 10.0
HEARTBEAT_S = 1.0
JOURNAL_RETENTION_S = 600
"""A journal outlives its request's terminal by this much."""
RESUME_GRACE_S = 15.0
"""A dead gateway's requests are cancelled this long after its lease lapses."""
REPLIES_MAX_ENTRIES = 20_000
"""Approximate bound of a reply stream; every journal is flushed far sooner."""
REPLIES_IDLE_TTL_S = 3600
"""A reply stream nobody writes to goes away."""
CONTROL_MAX_ENTRIES = 10_000


def requests(cell: str, lane: str) -> str:
    """Stream: one entry per request (wire.entries.RequestEntry). Removed by the terminal script only."""
    return f"{{{cell}}}:requests:{lane}"


def control(cell: str) -> str:
    """Stream: cancels (wire.entries.CancelEntry)."""
    return f"{{{cell}}}:control"


def replies(cell: str, gateway_id: GatewayId) -> str:
    """Stream: a cell's tokens and terminals for one gateway (wire.entries.ReplyEntry)."""
    return f"{{{cell}}}:replies:{gateway_id}"


def journal(cell: str, request_id: RequestId) -> str:
    """Hash: owner, lane, entry id, output so far (`o:<choice>:<position>` → packed u32), terminal."""
    return f"{{{cell}}}:req:{request_id}"


def live(cell: str) -> str:
    """Set: ids of requests without a terminal. Its size is the admission count."""
    return f"{{{cell}}}:live"


def lease(cell: str) -> str:
    """String with a TTL: the scheduler that is active."""
    return f"{{{cell}}}:lease"


def fence(cell: str) -> str:
    """Counter: the highest fencing number given out."""
    return f"{{{cell}}}:fence"


def cell_card(cell: str) -> str:
    """Hash with a TTL (the scheduler's lease): model, limits and state, which gateways read."""
    return f"{{{cell}}}:card"


def workers(cell: str) -> str:
    """Sorted set: worker id → unix time its lease lapses."""
    return f"{{{cell}}}:workers"


def worker(cell: str, worker_id: WorkerId) -> str:
    """Hash with a TTL: where a worker listens and what it is (wire.entries.WorkerEntry)."""
    return f"{{{cell}}}:worker:{worker_id}"


def roles(cell: str) -> str:
    """Hash: worker id → the role an operator wants of it (wire.plan.Role), until he takes it back."""
    return f"{{{cell}}}:roles"


def prefixes(cell: str, worker_id: WorkerId, epoch: Epoch) -> str:
    """Hash with a TTL (the worker's lease): the KV units a worker holds in one epoch (kvstore.prefix_index)."""
    return f"{{{cell}}}:px:{worker_id}:{epoch}"


def gateways(cell: str) -> str:
    """Sorted set: gateway id → unix time its lease lapses."""
    return f"{{{cell}}}:gateways"


def kv_unit(cell: str, name: str) -> str:
    """String with a TTL: one unit's KV as gpu_worker/tiers/unit_codec.py stores it. `name` is `<layout>:<hash>`."""
    return f"{{{cell}}}:kv:{name}"


def kv_order(cell: str) -> str:
    """Sorted set with a TTL: `<layout>:<hash>:<bytes>` of each kv_unit → µs since 1970 when it was stored."""
    return f"{{{cell}}}:kvorder"


def kv_total(cell: str) -> str:
    """Counter with a TTL: bytes of all in kv_order."""
    return f"{{{cell}}}:kvtotal"
