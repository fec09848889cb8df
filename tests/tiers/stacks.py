"""A stack over a few pages of fake KV, and everything a test wants to know of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from gpu_worker.tiers.disk_store import DiskStore
from gpu_worker.tiers.open_tiers import OpenStore, open_codec, open_stack
from gpu_worker.tiers.redis_store import RedisStore
from gpu_worker.tiers.redis_thread import RedisThread
from gpu_worker.tiers.stack import TierStack
from gpu_worker.tiers.unit_codec import Bytes, LowerTierDtype, UnitCodec
from gpu_worker.transfer.port import KvPages, UnitPlace
from observability.metrics import WorkerMetrics
from tests.worker.fake_runner import FakeRunner
from wire.ids import PageId
from wire.plan import Tier

UNIT_BYTES = 2 * 3 * 16 * 8
"""Of FakeRunner: K and V, layers, tokens, int64."""
TIMEOUT_S = 10.0
NAMESPACE = "fake@r1/int64/16"


class Opened:
    """An open stack; its counters are one test's own."""

    def __init__(self, stack: TierStack, kv: KvPages, metrics: WorkerMetrics) -> None:
        self.stack = stack
        self.kv = kv
        self._metrics = metrics

    def fill(self, page: int, number: int, index: int = 0) -> Bytes:
        """Write a unit of random bytes, the same ones for the same number: [layers, 2, unit_layer_bytes]."""
        shape = (self.kv.format.num_layers, 1, 2, self.kv.format.unit_layer_bytes)
        unit = np.random.default_rng(number).integers(0, 256, shape, np.uint8)
        for layer, data in enumerate(unit):
            self.kv.write(layer, [UnitPlace(PageId(page), index)], data)
        return unit[:, 0]

    def count(self, name: str, tier: Tier, **labels: str) -> float:
        value = self._metrics.registry.get_sample_value(f"phasemesh_worker_tier_{name}", {"tier": tier, **labels})
        return value or 0.0


@contextmanager
def open_opened(
    lower: Mapping[Tier, OpenStore] | None = None,
    *,
    host_units: int = 8,
    spare_units: int = 16,
    runner: FakeRunner | None = None,
    dtype: LowerTierDtype = LowerTierDtype.AUTO,
) -> Iterator[Opened]:
    """host_units: what the host holds, beside spare_units that may leave at once when there are tiers below."""
    runner = runner or FakeRunner()
    assert runner.kv is not None
    codec = open_codec(runner.kv.format, NAMESPACE, dtype)
    metrics = WorkerMetrics()
    spare_units = spare_units if lower else 0
    with open_stack(
        runner.kv,
        codec,
        lower or {},
        num_slots=host_units + spare_units,
        spare_slots=spare_units,
        pinned=False,
        metrics=metrics.tiers,
    ) as stack:
        yield Opened(stack, runner.kv, metrics)


def fake_codec() -> UnitCodec:
    """Of FakeRunner's pages."""
    kv = FakeRunner(num_pages=2).kv
    assert kv is not None
    return open_codec(kv.format, NAMESPACE, LowerTierDtype.AUTO)


def disk_below(directory: Path, *, units: int = 1000, ttl_s: float = 60) -> OpenStore:
    codec = fake_codec()
    size = codec.encoded_bytes
    return lambda on_change: DiskStore(
        directory, tag=codec.tag, encoded_bytes=size, budget_bytes=units * size, ttl_s=ttl_s, on_change=on_change
    )


def redis_below(url: str, cell: str, *, units: int = 1000, ttl_s: float = 60) -> OpenStore:
    codec = fake_codec()
    size = codec.encoded_bytes
    return lambda on_change: RedisStore(
        RedisThread(url, cell=cell),
        cell=cell,
        layout=codec.tag,
        encoded_bytes=size,
        budget_bytes=units * size,
        ttl_s=ttl_s,
        on_change=on_change,
    )
