"""Metrics of a worker's tiers below its KV pages, by tier: host, disk, redis. Bytes are those of encoded units."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from observability import names

READ_RESULTS = ("hit", "miss", "damaged")


class TierMetrics:
    """Thread-safe. Part of a worker's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        tier = ["tier"]
        self._units = Gauge(names.WORKER_TIER_UNITS, "Units of 16 tokens held.", tier, registry=registry)
        self._bytes = Gauge(names.WORKER_TIER_BYTES, "Bytes held.", tier, registry=registry)
        self._reads = Counter(
            names.WORKER_TIER_READS,
            "Units asked for, by what came of it: hit, miss, or damaged (dropped, and a miss).",
            ["tier", "result"],
            registry=registry,
        )
        self._saved = Counter(names.WORKER_TIER_SAVED, "Units stored.", tier, registry=registry)
        self._dropped = Counter(
            names.WORKER_TIER_DROPPED,
            "Units lost on their way into a tier: its queue was full, or it failed.",
            tier,
            registry=registry,
        )

    def set_contents(self, tier: str, num_units: int, num_bytes: int) -> None:
        self._units.labels(tier).set(num_units)
        self._bytes.labels(tier).set(num_bytes)

    def read(self, tier: str, result: str) -> None:
        """One of READ_RESULTS."""
        self._reads.labels(tier, result).inc()

    def saved(self, tier: str) -> None:
        self._saved.labels(tier).inc()

    def dropped(self, tier: str) -> None:
        self._dropped.labels(tier).inc()
