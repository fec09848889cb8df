"""Distinct identifier types. They cost nothing at run time and stop one id being passed for another."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One HTTP request; unique for all time (the gateway makes it)."""

SeqId = NewType("SeqId", int)
"""One choice of one request, inside one scheduler's lifetime. n > 1 gives one request several."""

WorkerId = NewType("WorkerId", str)
GatewayId = NewType("GatewayId", str)

Epoch = NewType("Epoch", int)
"""One life of a worker's KV tensors. A new epoch voids every page of the older one."""

Fence = NewType("Fence", int)
"""Fencing number of a scheduler's lease. A higher one always wins; a lower one is refused."""

PlanId = NewType("PlanId", int)
"""Counts up per worker session; plans run in this order."""

PullId = NewType("PullId", int)
"""One transfer of KV into a worker's pages; counts up per scheduler."""

PageId = NewType("PageId", int)
"""Index of a page in one worker's KV tensors, in [0, num_pages)."""

UnitHash = NewType("UnitHash", bytes)
"""32-byte SHA-256 chain hash of one unit of 16 tokens and everything before it."""

UNIT_TOKENS = 16
"""Tokens per hash unit. Page sizes are multiples of it (design §5)."""
