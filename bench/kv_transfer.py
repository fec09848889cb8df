"""KV transfer between two processes against memcpy, in one run: `python -m bench.kv_transfer [--units 16 64 256 512]`.

The source is a process of its own with the KV of SmolLM2-135M in float32 in scattered pages of 64 tokens. Transports
and memcpy (of as many bytes, between two warm arrays) take turns, so that a busy machine slows all alike; medians are
printed. The first pull by shared memory is printed by itself: it finds the source's pages not mapped yet. `shm (numpy)`
is shared memory without the CPU kernels, as on a machine without a C++ compiler.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import uvloop

from gpu_worker.kernels.library import load_kernels
from gpu_worker.residency import Residency
from gpu_worker.transfer.carriers import RemoteCarrier
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvFormat, unit_places
from gpu_worker.transfer.puller import TransferPuller
from gpu_worker.transfer.rpc import add_source
from gpu_worker.transfer.shared_pool import SharedPool
from gpu_worker.transfer.source import TransferSource
from gpu_worker.transfer.transports import GRPC, SHM, available_transports
from wire.config import ModelConfig, load
from wire.ids import UNIT_TOKENS, Epoch, PageId, PullId, UnitHash, WorkerId
from wire.model_path import cache_root
from wire.plan import KvPull, PullReport

SMOLLM2 = KvFormat("float32", num_layers=30, num_kv_heads=3, row_size=64, element_bytes=4, unit_tokens=UNIT_TOKENS)
PAGE_SIZE = 64
UNITS_PER_PAGE = PAGE_SIZE // UNIT_TOKENS
NAMESPACE = "bench"
EPOCH = Epoch(1)
LEASE_MS = 60_000


def unit_hashes(count: int) -> list[UnitHash]:
    return [UnitHash(i.to_bytes(32, "big")) for i in range(count)]


def warm_pool(num_pages: int) -> SharedPool:
    """One of which every byte was written, as if it had been in use for long."""
    pool = SharedPool(num_pages, num_pages * UNITS_PER_PAGE * SMOLLM2.num_layers * SMOLLM2.unit_layer_bytes)
    for half in HostPages(SMOLLM2, PAGE_SIZE, pool).halves:
        half[:] = 1
    return pool


def scattered(num_pages: int, seed: int) -> list[PageId]:
    return [PageId(page) for page in random.Random(seed).sample(range(num_pages), num_pages)]


async def serve(num_units: int) -> None:
    """The source: says its port in a line, ends with its standard input."""
    num_pages = -(-num_units // UNITS_PER_PAGE)
    pages = HostPages(SMOLLM2, PAGE_SIZE, warm_pool(num_pages))
    residency = Residency(PAGE_SIZE, num_pages, generations=pages.generations)
    page_ids = scattered(num_pages, seed=1)
    residency.pulled(page_ids, residency.void(page_ids), unit_hashes(num_units))
    source = TransferSource(
        pages, residency, namespace=NAMESPACE, epoch=lambda: EPOCH, transports=available_transports(pages)
    )
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    add_source(source, server)
    async with source:
        await server.start()
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0)


@contextlib.contextmanager
def source_process(num_units: int) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "bench.kv_transfer", "--serve", str(num_units)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"127.0.0.1:{process.stdout.readline().strip()}"
        process.communicate()


class Target:
    """Pulls by one transport."""

    def __init__(self, puller: TransferPuller, transport: str, address: str, num_pages: int) -> None:
        self._page_ids = scattered(num_pages, seed=2)
        self._puller, self._transport, self._address = puller, transport, address

    def pull(self, num_units: int) -> None:
        done: list[PullReport] = []
        over = threading.Event()

        def report(progress: PullReport) -> None:
            if progress.done:
                done.append(progress)
                over.set()

        page_ids = self._page_ids[: -(-num_units // UNITS_PER_PAGE)]
        places = unit_places(page_ids, num_units, PAGE_SIZE, UNIT_TOKENS)
        pull = KvPull(PullId(1), WorkerId("source"), self._address, EPOCH, unit_hashes(num_units), page_ids, LEASE_MS)
        self._puller.begin(pull, places, report)
        over.wait()
        if done[0].num_units != num_units or done[0].transport != self._transport:
            raise SystemExit(f"{self._transport}: {done[0]}")


def timed_s(run: Callable[[int], None], num_units: int) -> float:
    started = time.perf_counter()
    run(num_units)
    return time.perf_counter() - started


def measure(sizes: list[int], rounds: int) -> None:
    most = max(sizes)
    num_pages = -(-most // UNITS_PER_PAGE)
    pool = warm_pool(num_pages)
    kernels = load_kernels(cache_root(load(ModelConfig, os.environ)))
    by_numpy = HostPages(SMOLLM2, PAGE_SIZE, pool)
    by_kernels = by_numpy if kernels is None else HostPages(SMOLLM2, PAGE_SIZE, pool, copy_runs=kernels.copy_runs)
    plain_source, plain_target = (np.ones(most * SMOLLM2.unit_bytes, np.uint8) for _ in range(2))

    def memcpy(num_units: int) -> None:
        num_bytes = num_units * SMOLLM2.unit_bytes
        plain_target[:num_bytes] = plain_source[:num_bytes]

    with contextlib.ExitStack() as stack:
        address = stack.enter_context(source_process(most))
        contestants: dict[str, Callable[[int], None]] = {"memcpy": memcpy}
        for name, transport, pages in (
            ("shm", SHM, by_kernels),
            ("shm (numpy)", SHM, by_numpy),
            ("grpc", GRPC, by_kernels),
        ):
            remote = RemoteCarrier(pages, namespace=NAMESPACE, transports=(transport,))
            puller = stack.enter_context(TransferPuller(pages, remote, worker_id=WorkerId("target")))
            contestants[name] = Target(puller, transport, address, num_pages).pull
        first = timed_s(contestants["shm"], most)
        first_rate = most * SMOLLM2.unit_bytes / first / 1e9
        print(f"first pull by shm, {most} units: {first * 1e3:.1f} ms, {first_rate:.2f} GB/s")
        print(f"{'units':>6} {'MB':>7}  {'':11} {'ms':>9} {'GB/s':>7} {'x memcpy':>9}")
        for num_units in sizes:
            taken: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(rounds + 1):
                for name, run in contestants.items():
                    taken[name].append(timed_s(run, num_units))
            medians = {name: statistics.median(times[1:]) for name, times in taken.items()}
            num_bytes = num_units * SMOLLM2.unit_bytes
            for name, seconds in medians.items():
                ratio = seconds / medians["memcpy"]
                print(
                    f"{num_units:6} {num_bytes / 1e6:7.1f}  {name:11} {seconds * 1e3:9.2f} "
                    f"{num_bytes / seconds / 1e9:7.2f} {ratio:9.2f}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        uvloop.run(serve(arguments.serve))
    else:
        measure(arguments.units, arguments.rounds)


if __name__ == "__main__":
    main()
