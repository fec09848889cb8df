"""The source's side of a pull: says which units it has, and sends those the puller does not read for itself.

Pages are read and checked in threads of their own, a piece ahead of the one being sent:

    threads      read piece 1 ▸ still its page's? ▸ checksum | piece 2 …
    event loop                                                 send piece 1 …      flow control holds it back
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, TypeAlias

import grpc
import numpy as np

from gpu_worker.grpc_status import status_of
from gpu_worker.residency import Found, Residency
from gpu_worker.transfer.host_id import host_id
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.messages import CHUNK_BYTES, decode_format, encode_chunk, encode_pool
from gpu_worker.transfer.nixl import NixlEndpoint
from gpu_worker.transfer.port import KvPages, LowerTiers, UnitPlace
from gpu_worker.transfer.transports import GRPC, NIXL, SHM, choose_transport
from wire import transfer_pb2 as pb
from wire import transfer_pb2_grpc as pb_grpc
from wire.errors import MeshError, TransferFailed, TransferRefused
from wire.ids import Epoch, PageId, UnitHash

log = logging.getLogger("gpu_worker.transfer.source")

READING_THREADS = 2
MAX_SERVED = 16
"""Pulls served at once; more wait for their turn, and for no longer than their leases."""
PIECES_AHEAD = 2

_Piece: TypeAlias = Callable[[], list[pb.PullPart]]
"""Reads, checks and encodes some units."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Held:
    """The leading units of a request that are here."""

    num_units: int
    positions: list[int]
    """Among the request's hashes: those in pages."""
    found: Found
    """Of these, in that order."""


class TransferSource(pb_grpc.KvTransferServicer):
    """`async with TransferSource(…) as source`: what this worker gives to others."""

    def __init__(
        self,
        kv: KvPages | None,
        residency: Residency,
        *,
        namespace: str,
        epoch: Callable[[], Epoch],
        transports: Sequence[str],
        tiers: LowerTiers | None = None,
        endpoint: NixlEndpoint | None = None,
        after_read: Callable[[int], None] = lambda layer: None,
    ) -> None:
        """kv None: every pull is refused. after_read: called in the reading thread between a piece's read, whose layer
        it gets, and its check."""
        self._kv = kv
        self._residency = residency
        self._namespace = namespace
        self._epoch = epoch
        self._transports = transports
        self._tiers = tiers
        self._endpoint = endpoint
        self._after_read = after_read
        self._host_id = host_id()
        self._threads = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="kv-source")
        self._serving = asyncio.Semaphore(MAX_SERVED)

    async def __aenter__(self) -> TransferSource:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def Pull(  # type: ignore[override]  # grpc.aio takes a coroutine too; its stubs know generators only
        self, request: pb.PullRequest, context: Context
    ) -> None:
        try:
            kv = self._admit(request)
            lease_s = request.lease_ms / 1000
            async with asyncio.timeout(lease_s):
                await self._serving.acquire()
            try:
                await self._serve(kv, request, context, lease_s)
            finally:
                self._serving.release()
        except MeshError as error:
            log.info("pull ended", extra={"peer": context.peer(), "code": error.code, "reason": error.message})
            await context.abort(status_of(error), error.message)
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"lease_ms: nothing sent for {request.lease_ms} ms")

    async def Confirm(self, request: pb.ConfirmRequest, context: Context) -> pb.ConfirmReply:
        found = Found([UnitPlace(PageId(page), 0) for page in request.page_ids], list(request.generations))
        unchanged = request.source_epoch == self._epoch() and self._residency.still(found)
        return pb.ConfirmReply(unchanged=unchanged)

    def _admit(self, request: pb.PullRequest) -> KvPages:
        if self._kv is None:
            raise TransferRefused("this worker gives no KV")
        if request.source_epoch != self._epoch():
            raise TransferRefused(f"source_epoch: {request.source_epoch} asked for, it is {self._epoch()} now")
        if request.namespace != self._namespace:
            raise TransferRefused(f"namespace: {self._namespace} here, {request.namespace} there")
        difference = self._kv.format.difference(decode_format(request.format))
        if difference is not None:
            raise TransferRefused(difference)
        return self._kv

    async def _serve(self, kv: KvPages, request: pb.PullRequest, context: Context, lease_s: float) -> None:
        unit_hashes = [UnitHash(unit_hash) for unit_hash in request.unit_hashes]
        loop = asyncio.get_running_loop()
        held = await loop.run_in_executor(self._threads, self._find, unit_hashes)
        same_host = request.host_id == self._host_id != ""
        transport = choose_transport(request.transports, self._transports, same_host=same_host)
        offer = self._offer(kv, held, transport)

        async def send(part: pb.PullPart) -> None:
            async with asyncio.timeout(lease_s):
                await context.write(part)

        await send(pb.PullPart(offer=offer))
        if transport == GRPC:
            await self._send_all(self._page_pieces(kv, held), send)
        await self._send_all(self._tier_pieces(kv, held, request.unit_hashes), send)

    def _find(self, unit_hashes: Sequence[UnitHash]) -> _Held:
        """Unit by unit: in a page, else in a tier; up to the first that is in neither."""
        held = _Held(0, [], Found())
        while held.num_units < len(unit_hashes):
            found = self._residency.find(unit_hashes[held.num_units :])
            held.positions += range(held.num_units, held.num_units + len(found.places))
            held.found.places += found.places
            held.found.generations += found.generations
            held.num_units += len(found.places)
            below = 0 if self._tiers is None else len(self._tiers.find(unit_hashes[held.num_units :]))
            held.num_units += below
            if not below:
                break
        return held

    def _offer(self, kv: KvPages, held: _Held, transport: str) -> pb.Offer:
        offer = pb.Offer(num_units=held.num_units, transport=transport)
        if transport == GRPC:
            return offer
        columns = offer.in_pages
        columns.positions.extend(held.positions)
        columns.page_ids.extend(place.page_id for place in held.found.places)
        columns.generations.extend(held.found.generations)
        if transport == SHM:
            assert isinstance(kv, HostPages) and kv.pool_address is not None  # else it is not among the transports
            offer.shared_pool.CopyFrom(encode_pool(kv.pool_address, kv.pool_layout))
            columns.unit_indices.extend(map(kv.unit_index, held.found.places))
        elif transport == NIXL:
            assert self._endpoint is not None
            offer.nixl.CopyFrom(self._endpoint.offer())
            columns.unit_indices.extend(map(self._endpoint.pages.unit_index, held.found.places))
        return offer

    def _page_pieces(self, kv: KvPages, held: _Held) -> Iterator[_Piece]:
        """Layer by layer, as many units as a chunk holds; consecutive units of the request only."""
        most = max(1, CHUNK_BYTES // (2 * kv.format.unit_layer_bytes))
        spans = list(_spans(held.positions, most))
        for layer in range(kv.format.num_layers):
            for begin, end in spans:
                yield partial(self._read_pages, kv, held, layer, begin, end)

    def _read_pages(self, kv: KvPages, held: _Held, layer: int, begin: int, end: int) -> list[pb.PullPart]:
        part = Found(held.found.places[begin:end], held.found.generations[begin:end])
        data = kv.read(layer, part.places)
        self._after_read(layer)
        if not self._residency.still(part):
            raise TransferFailed(f"layer {layer}: a page got a new owner while it was read")
        return [encode_chunk(held.positions[begin], layer, data[np.newaxis])]

    def _tier_pieces(self, kv: KvPages, held: _Held, unit_hashes: Sequence[bytes]) -> Iterator[_Piece]:
        if self._tiers is None:
            return
        in_pages = set(held.positions)
        for position in range(held.num_units):
            if position not in in_pages:
                unit_hash = UnitHash(unit_hashes[position])
                yield partial(self._read_tier, kv, position, unit_hash)

    def _read_tier(self, kv: KvPages, position: int, unit_hash: UnitHash) -> list[pb.PullPart]:
        assert self._tiers is not None
        data = self._tiers.read(unit_hash)
        if data is None:
            raise TransferFailed(f"unit {position}: no longer in a lower tier")
        layers = max(1, CHUNK_BYTES // (2 * kv.format.unit_layer_bytes))
        return [
            encode_chunk(position, first, data[first : first + layers, np.newaxis])
            for first in range(0, kv.format.num_layers, layers)
        ]

    async def _send_all(self, pieces: Iterator[_Piece], send: Callable[[pb.PullPart], Awaitable[None]]) -> None:
        """In order, with PIECES_AHEAD of them under way in threads."""
        loop = asyncio.get_running_loop()
        under_way: deque[asyncio.Future[list[pb.PullPart]]] = deque()
        try:
            while True:
                for piece in islice(pieces, PIECES_AHEAD - len(under_way)):
                    under_way.append(loop.run_in_executor(self._threads, piece))
                if not under_way:
                    return
                for part in await under_way.popleft():
                    await send(part)
        finally:
            for future in under_way:
                future.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)


def _spans(positions: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of stretches of consecutive positions, each at most `most` long."""
    begin = 0
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1 or end - begin == most:
            yield begin, end
            begin = end
