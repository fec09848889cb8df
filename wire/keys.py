"""Every Redis key and every lifetime, in this one file.

Keys of a cell carry its hash tag `{cell}`, so a script that touches several of them stays on one slot of a
Redis Cluster. Lifetimes are seconds; a key without one lives until its owner removes it.
"""

from __future__ import annotations

from wire.ids import GatewayId, RequestId, WorkerId

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


def replies(gateway_id: GatewayId) -> str:
    """Stream: tokens and terminals for one gateway (wire.entries.ReplyEntry)."""
    return f"replies:{gateway_id}"


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


def gateways(cell: str) -> str:
    """Sorted set: gateway id → unix time its lease lapses."""
    return f"{{{cell}}}:gateways"
