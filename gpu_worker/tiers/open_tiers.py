"""From configuration to a running stack of tiers."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from gpu_worker.tiers.changes import ChangeLog
from gpu_worker.tiers.disk_store import DiskStore
from gpu_worker.tiers.host_store import HostStore, OnEvicted
from gpu_worker.tiers.port import LowerStore, OnChange
from gpu_worker.tiers.redis_store import RedisStore
from gpu_worker.tiers.redis_thread import RedisThread
from gpu_worker.tiers.stack import TierStack
from gpu_worker.tiers.unit_codec import Bytes, LowerTierDtype, PlainRows, UnitCodec, UnitLayout
from gpu_worker.tiers.write_behind import WriteBehind
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvFormat, KvPages
from observability.tier_metrics import TierMetrics
from wire.config import CellConfig, TierConfig
from wire.errors import ConfigInvalid
from wire.plan import SharedTier, Tier

_SLOT_ALIGN = 64
_LEAVING_SHARE = 4
_MAX_LEAVING = 256
"""Of the host's slots one in _LEAVING_SHARE, but no more than this, holds what the stores below still write: a long
prompt evicts as many units at once as it has, faster than they are written."""


OpenStore: TypeAlias = Callable[[OnChange], LowerStore]


@contextmanager
def open_tiers(
    config: TierConfig, cell: CellConfig, kv: KvPages | None, *, namespace: str, metrics: TierMetrics
) -> Iterator[TierStack | None]:
    """None when none is configured, or the worker has no KV to keep.

    namespace: of the unit hashes. Raises ConfigInvalid when a variable cannot be followed.
    """
    _check(config)
    if config.host_mb == 0 or kv is None:
        yield None
        return
    codec = open_codec(kv.format, namespace, LowerTierDtype(config.dtype))
    num_slots = (config.host_mb << 20) // _slot_bytes(codec)
    if num_slots < 2:
        raise ConfigInvalid(
            f"PHASEMESH_HOST_KV_MB={config.host_mb}: {num_slots} units of {_slot_bytes(codec)} bytes; "
            "at least 2 are needed",
            param="PHASEMESH_HOST_KV_MB",
        )
    lower = lower_stores(config, cell, codec)
    pinned = not isinstance(kv, HostPages)
    spare_slots = min(_MAX_LEAVING, max(1, num_slots // _LEAVING_SHARE)) if lower else 0
    with open_stack(
        kv,
        codec,
        lower,
        num_slots=num_slots,
        spare_slots=spare_slots,
        pinned=pinned,
        metrics=metrics,
        shared=shared_tier(config, codec),
    ) as stack:
        yield stack


@contextmanager
def open_stack(
    kv: KvPages,
    codec: UnitCodec,
    lower: Mapping[Tier, OpenStore],
    *,
    num_slots: int,
    spare_slots: int,
    pinned: bool,
    metrics: TierMetrics,
    shared: SharedTier | None = None,
) -> Iterator[TierStack]:
    """A running stack. lower: the tiers below the host, fastest first. num_slots: units of host memory, spare_slots of
    them for what is leaving; pinned: it is locked, for fast copies from and to a CUDA device. shared: what is said
    of the Redis tier."""
    changes = ChangeLog([Tier.HOST, *lower])
    slot_bytes = _slot_bytes(codec)
    with ExitStack() as opened:
        writers = []
        for tier, open_store in lower.items():
            store = open_store(changes.follower(tier))
            opened.callback(store.close)
            writers.append(WriteBehind(store, metrics))
        arena = open_arena(num_slots * slot_bytes, pinned=pinned)

        def open_host(on_evicted: OnEvicted) -> HostStore:
            return HostStore(
                arena,
                slot_bytes,
                spare_slots=spare_slots,
                on_change=changes.follower(Tier.HOST),
                on_evicted=on_evicted if writers else None,
            )

        stack = TierStack(kv, codec, open_host, writers, changes, metrics, shared=shared)
        stack.start()
        try:
            yield stack
        finally:
            stack.stop()


def open_codec(kv_format: KvFormat, namespace: str, dtype: LowerTierDtype) -> UnitCodec:
    """Raises ConfigInvalid for a type that these pages cannot be stored in."""
    layout = UnitLayout(namespace, kv_format.unit_bytes, kv_format.row_size * kv_format.element_bytes, kv_format.dtype)
    if dtype is LowerTierDtype.AUTO:
        return UnitCodec(layout, dtype, PlainRows(layout))
    from gpu_worker.tiers.quantized_rows import QUANTIZABLE, QuantizedRows  # torch, which simulated workers lack

    if QUANTIZABLE.get(kv_format.dtype) != kv_format.element_bytes:  # simulated KV has its model's type, and no numbers
        raise ConfigInvalid(
            f"PHASEMESH_LOWER_TIER_DTYPE={dtype}: KV pages of {layout.dtype} cannot be rounded; "
            f"only {', '.join(QUANTIZABLE)}",
            param="PHASEMESH_LOWER_TIER_DTYPE",
        )
    return UnitCodec(layout, dtype, QuantizedRows(layout, dtype))


def open_arena(num_bytes: int, *, pinned: bool) -> memoryview:
    """Memory that costs nothing until written, or locked memory. Raises ConfigInvalid when there is none."""
    try:
        if not pinned:
            arena = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            # Private, since shared memory gets no large pages: with small ones the compute thread, which touches a slot
            # first, would wait longer for them than for the copy.
            if hasattr(mmap, "MADV_HUGEPAGE"):
                arena.madvise(mmap.MADV_HUGEPAGE)
            return memoryview(arena)
        import torch

        locked: Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
        return memoryview(locked.data)
    except (OSError, RuntimeError) as error:
        raise ConfigInvalid(
            f"PHASEMESH_HOST_KV_MB: no {num_bytes / 2**20:.0f} MiB of host memory: {error}",
            param="PHASEMESH_HOST_KV_MB",
        ) from error


def _check(config: TierConfig) -> None:
    for name, size in (("PHASEMESH_DISK_KV_MB", config.disk_mb), ("PHASEMESH_REDIS_KV_MB", config.redis_mb)):
        if size and not config.host_mb:
            raise ConfigInvalid(f"{name}={size}: gets what host memory evicts; set PHASEMESH_HOST_KV_MB", param=name)
    if config.disk_mb and not config.disk_dir:
        raise ConfigInvalid(
            f"PHASEMESH_DISK_KV_MB={config.disk_mb}: PHASEMESH_DISK_KV_DIR is unset", param="PHASEMESH_DISK_KV_DIR"
        )


def _slot_bytes(codec: UnitCodec) -> int:
    return -(-codec.encoded_bytes // _SLOT_ALIGN) * _SLOT_ALIGN


def shared_tier(config: TierConfig, codec: UnitCodec) -> SharedTier | None:
    """What makes this worker's Redis tier one with others', and what bounds it; None without one."""
    if not config.redis_mb:
        return None
    max_units = (config.redis_mb << 20) // codec.encoded_bytes
    return SharedTier(codec.tag, max_units, round(config.redis_ttl_s * 1000))


def lower_stores(config: TierConfig, cell: CellConfig, codec: UnitCodec) -> dict[Tier, OpenStore]:
    """The stores that are configured, fastest first."""

    def open_disk(on_change: OnChange) -> LowerStore:
        assert config.disk_dir is not None  # _check
        return DiskStore(
            Path(config.disk_dir),
            tag=codec.tag,
            encoded_bytes=codec.encoded_bytes,
            budget_bytes=config.disk_mb << 20,
            ttl_s=config.disk_ttl_s,
            on_change=on_change,
        )

    def open_redis(on_change: OnChange) -> LowerStore:
        return RedisStore(
            RedisThread(cell.redis_url, cell=cell.cell),
            cell=cell.cell,
            layout=codec.tag,
            encoded_bytes=codec.encoded_bytes,
            budget_bytes=config.redis_mb << 20,
            ttl_s=config.redis_ttl_s,
            on_change=on_change,
        )

    stores: dict[Tier, OpenStore] = {}
    if config.disk_mb:
        stores[Tier.DISK] = open_disk
    if config.redis_mb:
        stores[Tier.REDIS] = open_redis
    return stores
