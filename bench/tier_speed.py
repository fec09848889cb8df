"""How fast units move between pages and tiers: `python -m bench.tier_speed [--redis-url URL] [--directory DIR]`.

Pages of SmolLM2-135M's KV (float32: 737,280 bytes a unit) are saved, and every unit is read back from each tier that is
given, checks included, by one thread. Medians over units; the file system's cache is as it is, so a disk is read from
memory unless the directory is larger than that. `save` is what the compute thread waits for.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gpu_worker.tiers.open_tiers import lower_stores, open_codec, open_stack
from gpu_worker.tiers.unit_codec import LowerTierDtype
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvFormat, UnitPlace
from gpu_worker.transfer.shared_pool import SharedPool
from observability.metrics import WorkerMetrics
from wire.config import CellConfig, TierConfig
from wire.ids import PageId, UnitHash
from wire.plan import PageUnits, Tier

FORMAT = KvFormat("float32", num_layers=30, num_kv_heads=3, row_size=64, element_bytes=4, unit_tokens=16)
PAGE_SIZE = 64
FLUSH_TIMEOUT_S = 60.0


def open_pages(num_pages: int) -> HostPages:
    pool = SharedPool(num_pages, num_pages * PAGE_SIZE // FORMAT.unit_tokens * FORMAT.unit_bytes // 2)
    kv = HostPages(FORMAT, PAGE_SIZE, pool)
    rng = np.random.default_rng(0)
    for layer in range(FORMAT.num_layers):
        for page in range(num_pages):
            places = [UnitPlace(PageId(page), index) for index in range(kv.units_per_page)]
            numbers = rng.standard_normal((len(places), 2, FORMAT.unit_layer_bytes // 4), dtype=np.float32)
            kv.write(layer, places, numbers.view(np.uint8))
    return kv


def timed(run: Callable[[], object]) -> float:
    begun_s = time.perf_counter()
    run()
    return time.perf_counter() - begun_s


def measure(config: TierConfig, cell: CellConfig, num_units: int, dtype: LowerTierDtype) -> dict[str, list[float]]:
    """Seconds per unit: of saving, and of reading from the slowest tier that `config` names."""
    units_per_page = PAGE_SIZE // FORMAT.unit_tokens
    kv = open_pages(num_units // units_per_page)
    codec = open_codec(FORMAT, "bench.tier_speed", dtype)
    lower = lower_stores(config, cell, codec)
    hashes = [UnitHash(np.random.default_rng(number).bytes(32)) for number in range(num_units)]
    pages = [
        PageUnits(PageId(page), hashes[page * units_per_page : (page + 1) * units_per_page])
        for page in range(num_units // units_per_page)
    ]
    held = 1 if lower else num_units
    with open_stack(
        kv,
        codec,
        lower,
        num_slots=held + num_units,
        spare_slots=num_units if lower else 0,
        pinned=False,
        metrics=WorkerMetrics().tiers,
    ) as stack:
        times = {"save": [timed(lambda page=page: stack.save([page])) / units_per_page for page in pages]}  # type: ignore[misc]
        begun_s = time.perf_counter()
        assert stack.flush(FLUSH_TIMEOUT_S)
        if lower:
            times["write"] = [(time.perf_counter() - begun_s + sum(times["save"]) * units_per_page) / num_units]
        slowest = list(lower)[-1] if lower else Tier.HOST
        below = [unit_hash for unit_hash in hashes if stack.find([unit_hash]) == [slowest]]
        times["read"] = [timed(lambda unit_hash=unit_hash: stack.read(unit_hash)) for unit_hash in below]  # type: ignore[misc]
    return times


def row(tier: Tier, dtype: LowerTierDtype, times: dict[str, list[float]]) -> str:
    def cell(name: str) -> str:
        median_s = statistics.median(times[name]) if name in times else math.nan
        return "" if math.isnan(median_s) else f"{median_s * 1e6:.0f} µs, {FORMAT.unit_bytes / median_s / 1e9:.2f} GB/s"

    return f"| {tier} | {dtype} | {cell('save')} | {cell('write')} | {cell('read')} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=128, help="a multiple of 4")
    parser.add_argument("--directory", type=Path, help="for the disk; default: the system's for temporary files")
    parser.add_argument("--redis-url", help="without it, Redis is not measured")
    arguments = parser.parse_args()
    print(f"{arguments.units} units of {FORMAT.unit_bytes} bytes; bytes per second are those of the KV itself\n")
    print("| tier | stored as | save, a unit | until written below | read, a unit |")
    print("|---|---|---|---|---|")
    megabytes = 2 * arguments.units * FORMAT.unit_bytes >> 20
    for dtype in LowerTierDtype:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            configs = {Tier.HOST: TierConfig(), Tier.DISK: TierConfig(disk_mb=megabytes, disk_dir=directory)}
            if arguments.redis_url:
                configs[Tier.REDIS] = TierConfig(redis_mb=megabytes, redis_ttl_s=60.0)
            for tier, config in configs.items():
                cell = CellConfig(cell=f"tier-speed-{dtype}", redis_url=arguments.redis_url or "")
                print(row(tier, dtype, measure(config, cell, arguments.units, dtype)), flush=True)


if __name__ == "__main__":
    main()
