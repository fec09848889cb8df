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
from typing import Any, Self, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from gpu_worker.grpc_status import status_of
from gpu_worker.residency import Found, Residency
from gpu_worker.transfer.host_id import host_id
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.messages import CHUNK_BYTES, decode_format, encode_chunk, encode_pool
from gpu_worker.transfer.nearby import AskServer
from gpu_worker.transfer.nixl import NixlEndpoint
from gpu_worker.transfer.port import KvFormat, KvPages, LowerTiers, UnitPlace
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

_Piece: TypeAlias = Callable[[], list[bytes]]
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


@dataclass(frozen=True, slots=True)
class _Span:
    """Units in pages that go in one chunk: consecutive ones of the request."""

    units: range
    places: list[UnitPlace]
    pages: Found
    """Their pages, each once."""


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
        after_read: Callable[[int], None] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """kv None: every pull is refused. after_read: called in the reading thread between the read of a layer's chunk
        and its check; with it, layers share no chunk. chunk_bytes: of data, at most; one unit in one layer at least."""
        self._kv = kv
        self._residency = residency
        self._namespace = namespace
        self._epoch = epoch
        self._transports = transports
        self._tiers = tiers
        self._endpoint = endpoint
        self._after_read = after_read
        self._chunk_bytes = chunk_bytes
        self._host_id = host_id()
        self._asks: AskServer | None = None
        self._threads = ThreadPoolExecutor(READING_THREADS, thread_name_prefix="kv-source")
        self._serving = asyncio.Semaphore(MAX_SERVED)

    async def __aenter__(self) -> Self:
        if SHM in self._transports:
            try:
                self._asks = AskServer(self._answer)
            except OSError as error:  # a sandbox without such sockets, say
                log.warning("neighbours ask by gRPC", extra={"reason": str(error)})
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._asks is not None:
            self._asks.close()
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

    def _answer(self, raw: bytes) -> bytes | None:
        """To a neighbour, in the thread of its asks: an offer of all it wants, in pages; None: let it ask by gRPC."""
        try:
            request = pb.PullRequest.FromString(raw)
            kv = self._admit(request)
        except (DecodeError, MeshError):
            return None
        found = self._residency.find([UnitHash(unit_hash) for unit_hash in request.unit_hashes])
        if len(found.places) < len(request.unit_hashes) or request.host_id != self._host_id:
            return None
        return self._offer(kv, _Held(len(found.places), [*range(len(found.places))], found), SHM).SerializeToString()

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
        held = await self._find([UnitHash(unit_hash) for unit_hash in request.unit_hashes])
        same_host = request.host_id == self._host_id != ""
        transport = choose_transport(request.transports, self._transports, same_host=same_host)
        offer = self._offer(kv, held, transport)

        async def send(part: bytes) -> None:
            async with asyncio.timeout(lease_s):
                await context.write(part)

        await send(pb.PullPart(offer=offer).SerializeToString())
        if transport == GRPC:
            await self._send_all(self._page_pieces(kv, held), send)
        await self._send_all(self._tier_pieces(kv, held, request.unit_hashes), send)

    async def _find(self, unit_hashes: Sequence[UnitHash]) -> _Held:
        """Unit by unit: in a page, else in a tier; up to the first that is in neither.

        Pages are looked up here, in microseconds; tiers, which may have to ask, in a thread.
        """
        loop = asyncio.get_running_loop()
        held = _Held(0, [], Found())
        while True:
            found = self._residency.find(unit_hashes[held.num_units :])
            held.positions += range(held.num_units, held.num_units + len(found.places))
            held.found.places += found.places
            held.found.generations += found.generations
            held.num_units += len(found.places)
            rest = unit_hashes[held.num_units :]
            if self._tiers is None or not rest:
                return held
            below = await loop.run_in_executor(self._threads, self._tiers.find, rest)
            held.num_units += len(below)
            if not below:
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
            offer.shared_pool.ask_socket = "" if self._asks is None else self._asks.name
            columns.unit_indices.extend(map(kv.unit_index, held.found.places))
        elif transport == NIXL:
            assert self._endpoint is not None
            offer.nixl.CopyFrom(self._endpoint.offer())
            columns.unit_indices.extend(map(self._endpoint.pages.unit_index, held.found.places))
        return offer

    def _page_pieces(self, kv: KvPages, held: _Held) -> Iterator[_Piece]:
        """Layer by layer, in chunks of consecutive units of the request; small layers share a chunk."""
        spans = _spans(held, max(1, self._chunk_bytes // (2 * kv.format.unit_layer_bytes)))
        longest = max((len(span.units) for span in spans), default=1)
        for layers in _layer_ranges(kv.format, longest, 0 if self._after_read else self._chunk_bytes):
            for span in spans:
                yield partial(self._read_pages, kv, span, layers)

    def _read_pages(self, kv: KvPages, span: _Span, layers: range) -> list[bytes]:
        pieces = [piece for layer in layers for piece in kv.pieces(layer, span.places)]
        part = encode_chunk(span.units, layers, pieces)
        if self._after_read is not None:
            self._after_read(layers[-1])
        if not self._residency.still(span.pages):
            raise TransferFailed(f"layer {layers[-1]}: a page got a new owner while it was read")
        return [part]

    def _tier_pieces(self, kv: KvPages, held: _Held, unit_hashes: Sequence[bytes]) -> Iterator[_Piece]:
        if self._tiers is None:
            return
        in_pages = set(held.positions)
        for position in range(held.num_units):
            if position not in in_pages:
                unit_hash = UnitHash(unit_hashes[position])
                yield partial(self._read_tier, kv, position, unit_hash)

    def _read_tier(self, kv: KvPages, position: int, unit_hash: UnitHash) -> list[bytes]:
        assert self._tiers is not None
        data = self._tiers.read(unit_hash)
        if data is None:
            raise TransferFailed(f"unit {position}: no longer in a lower tier")
        units = range(position, position + 1)
        return [
            encode_chunk(units, layers, [data[layers.start : layers.stop]])
            for layers in _layer_ranges(kv.format, 1, self._chunk_bytes)
        ]

    async def _send_all(self, pieces: Iterator[_Piece], send: Callable[[bytes], Awaitable[None]]) -> None:
        """In order, with PIECES_AHEAD of them under way in threads."""
        loop = asyncio.get_running_loop()
        under_way: deque[asyncio.Future[list[bytes]]] = deque()
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


def _spans(held: _Held, most: int) -> list[_Span]:
    """The units in pages, in stretches of consecutive positions, each at most `most` long."""
    spans, begin = [], 0
    positions = held.positions
    for end in range(1, len(positions) + 1):
        if end == len(positions) or positions[end] != positions[end - 1] + 1 or end - begin == most:
            units = range(positions[begin], positions[begin] + end - begin)
            found = Found(held.found.places[begin:end], held.found.generations[begin:end])
            spans.append(_Span(units, found.places, _by_page(found)))
            begin = end
    return spans


def _by_page(found: Found) -> Found:
    """What `still` need look at."""
    owners = {(place.page_id, generation) for place, generation in zip(found.places, found.generations, strict=True)}
    return Found([UnitPlace(page, 0) for page, _ in owners], [generation for _, generation in owners])


def _layer_ranges(kv_format: KvFormat, num_units: int, chunk_bytes: int) -> list[range]:
    """All layers, as many at once as a chunk of so many units holds; one at least."""
    step = max(1, chunk_bytes // (num_units * 2 * kv_format.unit_layer_bytes))
    return [range(first, min(first + step, kv_format.num_layers)) for first in range(0, kv_format.num_layers, step)]
