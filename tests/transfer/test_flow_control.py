"""A puller that does not read holds its source back, in chunks that were read and not yet taken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
import numpy as np

from gpu_worker.residency import Residency
from gpu_worker.transfer.carriers import CHANNEL_OPTIONS, RemoteCarrier
from gpu_worker.transfer.host_id import host_id
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.messages import encode_format
from gpu_worker.transfer.port import Bytes, KvFormat, KvPages, UnitPlace, unit_places
from gpu_worker.transfer.puller import TransferPuller
from gpu_worker.transfer.rpc import SourceStub, add_source
from gpu_worker.transfer.shared_pool import SharedPool
from gpu_worker.transfer.source import Context, TransferSource
from gpu_worker.transfer.transports import GRPC
from tests.worker.test_executor import TIMEOUT_S
from wire import transfer_pb2 as pb
from wire.ids import Epoch, PageId, PullId, UnitHash, WorkerId
from wire.plan import KvPull, PullReport

FORMAT = KvFormat("float32", num_layers=4, num_kv_heads=4, row_size=64, element_bytes=4, unit_tokens=16)
NUM_UNITS = 256
"""32 MiB in chunks of 64 KiB."""
CHUNK_BYTES = 1 << 16
NUM_CHUNKS = NUM_UNITS * FORMAT.unit_bytes // CHUNK_BYTES
MOST_AHEAD = 2 * (1 << 20) // CHUNK_BYTES
"""What may be on its way to somebody who does not read: HTTP/2's window of 1 MiB, and a few chunks at either end."""
SHORT_LEASE_MS = 300
HASHES = [UnitHash(i.to_bytes(32, "big")) for i in range(NUM_UNITS)]
PAGE_IDS = [PageId(page) for page in range(NUM_UNITS)]


class CountingSource(TransferSource):
    """Counts the chunks it has read, and says when it has done with a pull."""

    def __init__(self, kv: HostPages, residency: Residency) -> None:
        super().__init__(
            kv,
            residency,
            namespace="flow",
            epoch=lambda: Epoch(1),
            transports=(GRPC,),
            after_read=self._count,
            chunk_bytes=CHUNK_BYTES,
        )
        self.num_chunks = 0
        self.over = asyncio.Event()
        self._lock = threading.Lock()

    def _count(self, layer: int) -> None:
        with self._lock:
            self.num_chunks += 1

    async def _serve(self, kv: KvPages, request: pb.PullRequest, context: Context, lease_s: float) -> None:
        try:
            await super()._serve(kv, request, context, lease_s)
        finally:
            self.over.set()


class SlowPages(HostPages):
    """Pages whose first write waits until it is told to go on."""

    def __init__(self) -> None:
        super().__init__(FORMAT, 16, SharedPool(NUM_UNITS, NUM_UNITS * FORMAT.unit_bytes // 2))
        self.entered, self.go_on = threading.Event(), threading.Event()

    def write(self, layer: int, places: Sequence[UnitPlace], data: Bytes) -> None:
        self.entered.set()
        assert self.go_on.wait(TIMEOUT_S)
        super().write(layer, places, data)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[CountingSource, HostPages, str]]:
    """A source that has all HASHES, its pages, and its address."""
    kv = HostPages(FORMAT, 16, SharedPool(NUM_UNITS, NUM_UNITS * FORMAT.unit_bytes // 2))
    for half in kv.halves:
        half[:] = np.random.default_rng(0).integers(0, 256, half.shape, np.uint8)
    residency = Residency(16, NUM_UNITS, generations=kv.generations)
    residency.pulled(PAGE_IDS, residency.void(PAGE_IDS), HASHES)
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    async with CountingSource(kv, residency) as source:
        add_source(source, server)
        await server.start()
        yield source, kv, f"127.0.0.1:{port}"
        await server.stop(0)


class Taker:
    """A worker that pulls all of it, into pages of its own."""

    def __init__(self, kv: SlowPages, address: str) -> None:
        self.kv = kv
        self._remote = RemoteCarrier(kv, namespace="flow", transports=(GRPC,))
        self.puller = TransferPuller(kv, self._remote, worker_id=WorkerId("taker"))
        self._address = address

    def begin(self) -> asyncio.Future[PullReport]:
        """Its last report."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[PullReport] = loop.create_future()

        def report(progress: PullReport) -> None:
            if progress.done:
                loop.call_soon_threadsafe(done.set_result, progress)

        pull = KvPull(PullId(1), WorkerId("source"), self._address, Epoch(1), HASHES, PAGE_IDS, lease_ms=60_000)
        self.puller.begin(pull, unit_places(PAGE_IDS, NUM_UNITS, 16, 16), report)
        return done


async def test_a_slow_puller_holds_its_source_back_and_nobody_else_up() -> None:
    slow_pages, quick_pages = SlowPages(), SlowPages()
    quick_pages.go_on.set()
    async with serving() as (source, kv, address):
        slow, quick = Taker(slow_pages, address), Taker(quick_pages, address)
        with slow.puller, quick.puller:
            stalled = slow.begin()
            assert await asyncio.to_thread(slow_pages.entered.wait, TIMEOUT_S)
            for finished in range(1, 4):  # meanwhile the source has every opportunity to read on
                assert (await quick.begin()).num_units == NUM_UNITS
                assert 1 <= source.num_chunks - finished * NUM_CHUNKS <= MOST_AHEAD
            assert not stalled.done()
            slow_pages.go_on.set()
            report = await stalled
        assert (report.num_units, report.failure) == (NUM_UNITS, None)
        assert source.num_chunks == 4 * NUM_CHUNKS
        for pages in (slow_pages, quick_pages):
            assert all(np.array_equal(half, there) for half, there in zip(pages.halves, kv.halves, strict=True))


async def test_a_puller_that_reads_nothing_is_given_up_when_its_lease_is_over() -> None:
    async with serving() as (source, _, address):
        with grpc.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            request = pb.PullRequest(
                source_epoch=1,
                namespace="flow",
                format=encode_format(FORMAT),
                unit_hashes=HASHES,
                host_id=host_id(),
                transports=[GRPC],
                lease_ms=SHORT_LEASE_MS,
            )
            call = SourceStub(channel).pull(request)
            async with asyncio.timeout(TIMEOUT_S):
                await source.over.wait()
            assert 1 <= source.num_chunks <= MOST_AHEAD
            ahead = source.num_chunks
            taken = 0
            try:
                while await asyncio.to_thread(next, call, None) is not None:
                    taken += 1
            except grpc.RpcError as error:
                assert isinstance(error, grpc.Call)
                assert (error.code(), error.details()) == (
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    f"lease_ms: nothing sent for {SHORT_LEASE_MS} ms",
                )
            else:
                raise AssertionError("the pull ended well")
            assert taken <= ahead + 1  # and the offer
            assert source.num_chunks == ahead
