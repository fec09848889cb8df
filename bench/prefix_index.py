"""What the prefix index costs: `python -m bench.prefix_index --redis-url U`, at 100,000 units on each of 16 workers.

| case | what the workers hold |
|---|---|
| shared | all the same units: every one of them has to be followed to the chain's end |
| own | each its own: 1,600,000 different units, one holder for each chain |

For each: lookups of a 512-unit chain in the twin, whose units came in order or scattered, and in Redis, by script and
by pipelines; what a change costs in the twin; memory for each unit of each worker. Chains are taken at random and
their hashes are new objects, so neither finds them in a cache. Keys lie in a cell of their own, which is removed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.measure import percentile
from kvstore.prefix_index import Holder
from kvstore.prefix_twin import PrefixTwin
from kvstore.redis_prefix_index import RedisPrefixIndex
from wire import keys
from wire.collector import calm_collector
from wire.ids import Epoch, Fence, UnitHash, WorkerId
from wire.plan import Tier
from wire.redis_client import open_redis

CELL = "bench-prefix-index"
FENCE = Fence(1)
WRITE_UNITS = 2048
CHANGED_UNITS = 32
"""That come or go at once in the twin: those of a chunk of 512 tokens."""
SEED = 7


@dataclass(frozen=True, slots=True)
class Load:
    holders: list[Holder]
    held: list[list[UnitHash]]
    """By holder."""
    chain_units: int

    def chains(self, count: int) -> list[list[UnitHash]]:
        """Stretches of what somebody holds."""
        draws = random.Random(SEED)
        chains = []
        for _ in range(count):
            units = draws.choice(self.held)
            first = draws.randrange(len(units) - self.chain_units + 1)
            chains.append([UnitHash(bytes(bytearray(u))) for u in units[first : first + self.chain_units]])
        return chains


def make_load(case: str, workers: int, units: int, chain_units: int) -> Load:
    def some() -> list[UnitHash]:
        return [UnitHash(os.urandom(32)) for _ in range(units)]

    holders = [Holder(WorkerId(f"w{i}"), Epoch(1)) for i in range(workers)]
    shared = some()
    return Load(holders, [shared if case == "shared" else some() for _ in holders], chain_units)


def fill_twin(load: Load, *, scattered: bool = False) -> PrefixTwin:
    """scattered: units come in random order, as those do that many sequences decode by turns."""
    twin = PrefixTwin()
    for holder, units in zip(load.holders, load.held, strict=True):
        arriving = random.Random(SEED).sample(units, len(units)) if scattered else units
        for start in range(0, len(units), CHANGED_UNITS):
            twin.add(holder.worker_id, arriving[start : start + CHANGED_UNITS], Tier.DEVICE)
    return twin


def twin_bytes(load: Load) -> int:
    """Memory of a twin, less the hashes themselves, which page pools hold as well."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    twin = fill_twin(load)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used + twin.table_bytes


def measure_changes(load: Load) -> None:
    """Prints what a unit costs that comes, and one that goes."""
    began = time.perf_counter()
    twin = fill_twin(load)
    filled = time.perf_counter()
    num_removed = 0
    for holder, units in zip(load.holders[:2], load.held, strict=False):
        for start in range(0, len(units), CHANGED_UNITS):
            twin.remove(holder.worker_id, units[start : start + CHANGED_UNITS], Tier.DEVICE)
        num_removed += len(units)
    removed = time.perf_counter()
    num_held = sum(map(len, load.held))
    costs = 1e6 * (filled - began) / num_held, 1e6 * (removed - filled) / num_removed
    print("  twin, changes            {:.2f} µs for a unit that comes, {:.2f} µs for one that goes".format(*costs))


def measure_twin(twin: PrefixTwin, chains: Sequence[list[UnitHash]]) -> list[float]:
    seconds = []
    for chain in chains:
        began = time.perf_counter()
        found = twin.lookup(chain)
        seconds.append(time.perf_counter() - began)
        assert any(prefix.device == len(chain) for prefix in found.values())
    return seconds


async def measure_index(
    index: RedisPrefixIndex, load: Load, chains: Sequence[list[UnitHash]], after_each: Callable[[], Awaitable[Any]]
) -> list[float]:
    seconds = []
    for chain in chains:
        began = time.perf_counter()
        found = await index.lookup(chain, load.holders)
        seconds.append(time.perf_counter() - began)
        assert any(prefix.device == len(chain) for prefix in found.values())
        await after_each()
    return seconds


def show(what: str, seconds: list[float]) -> None:
    ordered = sorted(seconds)
    p50, p99 = (percentile(ordered, share) for share in (0.5, 0.99))
    print(f"  {what:<24} p50 {1e6 * p50:8.1f} µs   p99 {1e6 * p99:8.1f} µs   ({len(ordered)} lookups)", flush=True)


async def fill_redis(redis: Any, index: RedisPrefixIndex, load: Load) -> None:
    await redis.set(keys.fence(CELL), FENCE)
    for holder, units in zip(load.holders, load.held, strict=True):
        for start in range(0, len(units), WRITE_UNITS):
            await index.write(holder, dict.fromkeys(units[start : start + WRITE_UNITS], (Tier.DEVICE,)))
        await redis.persist(_key(holder))


async def run_case(case: str, options: argparse.Namespace) -> None:
    print(f"{case}: {options.units} units on each of {options.workers} workers, chains of {options.chain}")
    load = make_load(case, options.workers, options.units, options.chain)
    num_held = options.units * options.workers
    for what, scattered in (("twin", False), ("twin, scattered", True)):
        show(what, measure_twin(fill_twin(load, scattered=scattered), load.chains(options.lookups)))
    measure_changes(load)
    print(f"  twin                     {twin_bytes(load) / num_held:8.1f} bytes per unit of a worker")
    if options.twin:
        return
    async with open_redis(options.redis_url, cell=CELL, command_timeout_s=30.0) as client:
        redis: Any = client
        index = RedisPrefixIndex(redis, CELL, fence=FENCE)
        try:
            await fill_redis(redis, index, load)
            used = [await redis.memory_usage(_key(holder), samples=0) for holder in load.holders]
            chains = load.chains(options.lookups)
            await index.lookup(chains[0], load.holders)  # loads the script
            show("Redis, by script", await measure_index(index, load, chains, redis.ping))
            piped = RedisPrefixIndex(redis, CELL, scripts=False)
            exact = RedisPrefixIndex(redis, CELL, exact=True)
            few = chains[: max(1, options.lookups // 4)]
            await exact.lookup(chains[0], load.holders)
            show("Redis, by exact script", await measure_index(exact, load, few, redis.ping))
            show("Redis, by pipelines", await measure_index(piped, load, few, redis.ping))
            print(f"  Redis                    {sum(used) / num_held:8.1f} bytes per unit of a worker (MEMORY USAGE)")
        finally:
            await redis.unlink(keys.fence(CELL), *(_key(holder) for holder in load.holders))


def _key(holder: Holder) -> str:
    return keys.prefixes(CELL, holder.worker_id, holder.epoch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis-url", default="redis://127.0.0.1:6379/0")
    parser.add_argument("--case", choices=("shared", "own"), action="append", help="default: both")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--units", type=int, default=100_000, help="of each worker")
    parser.add_argument("--chain", type=int, default=512, help="units")
    parser.add_argument("--twin", action="store_true", help="without Redis")
    parser.add_argument("--lookups", type=int, default=1000)
    options = parser.parse_args()
    if options.chain > options.units:
        parser.error(f"--chain {options.chain}: at most --units, {options.units}")
    calm_collector()
    for case in options.case or ("shared", "own"):
        asyncio.run(run_case(case, options))


if __name__ == "__main__":
    main()
