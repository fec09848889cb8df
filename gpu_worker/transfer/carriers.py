"""How the units of one pull come: from another worker, by the transport the two agree on, or from the tiers below."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import grpc

from gpu_worker.transfer.host_id import host_id
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.messages import decode_chunk, decode_offer, encode_format
from gpu_worker.transfer.nearby import Neighbours
from gpu_worker.transfer.nixl import NixlEndpoint, NixlReader
from gpu_worker.transfer.port import KvPages, LowerTiers, UnitPlace
from gpu_worker.transfer.pull import Pull
from gpu_worker.transfer.rpc import SourceStub
from gpu_worker.transfer.shm import PoolMaps, PoolReader
from gpu_worker.transfer.transports import GRPC, NIXL, SHM, MemoryReader
from wire import transfer_pb2 as pb
from wire.errors import TransferFailed
from wire.plan import LOWER_TIERS

log = logging.getLogger("gpu_worker.transfer.carriers")

CHANNEL_OPTIONS = (
    # A source that is gone without a FIN is noticed in two seconds, and one that came back within one.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # How far a source may be ahead of what is read here: two chunks, and no more on a fast link, where gRPC's own
    # estimate grows to 4 MiB. At 0.2 ms between two hosts that still lets 5 GB/s through.
    ("grpc.http2.lookahead_bytes", 1 << 20),
    ("grpc.http2.bdp_probe", 0),
)
COPY_BYTES = 4 << 20
"""Copied at once, under the pull's lock: one that is ended meanwhile waits for no more."""
MAX_CHANNELS = 64
"""Sources a worker stays connected to."""


class Carrier(Protocol):
    def carry(self, pull: Pull) -> None:
        """Bring what the source has of the pull's units, in the calling thread. Raises TransferFailed, or PullOver
        when the pull was ended meanwhile."""
        ...


class TierCarrier:
    """From this worker's own tiers below its pages."""

    def __init__(self, tiers: LowerTiers, kv: KvPages) -> None:
        self._tiers = tiers
        self._num_layers = kv.format.num_layers

    def carry(self, pull: Pull) -> None:
        """Unit by unit, each in all its layers."""
        hashes = pull.request.unit_hashes
        tiers = self._tiers.find(hashes)
        if tiers:
            pull.transport = max(tiers, key=LOWER_TIERS.index)  # the slowest of them
        for position, unit_hash in enumerate(hashes):
            data = self._tiers.read(unit_hash) if position < len(tiers) else None
            if data is None:
                raise TransferFailed(f"unit {position} of {len(hashes)}: in none of this worker's tiers")
            for layer in range(self._num_layers):
                pull.store(layer, position, data[layer : layer + 1])


class RemoteCarrier:
    """From another worker. Used by all pulls' threads."""

    def __init__(
        self,
        kv: KvPages,
        *,
        namespace: str,
        transports: Sequence[str],
        endpoint: NixlEndpoint | None = None,
        after_copy: Callable[[int], None] | None = None,
    ) -> None:
        """after_copy: called between the copy of a layer out of the source's memory and its check; with it, layers are
        copied one by one."""
        self._kv = kv
        self._namespace = namespace
        self._transports = transports
        self._endpoint = endpoint
        self._after_copy = after_copy
        self._host_id = host_id()
        self._format = encode_format(kv.format)
        self._maps = PoolMaps()
        self._neighbours = Neighbours()
        self._sources: dict[str, tuple[grpc.Channel, SourceStub]] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        self._maps.clear()
        self._neighbours.close()
        for channel, _ in self._sources.values():
            channel.close()

    def drop_dead(self) -> None:
        """Let go of the memory of neighbours whose processes are gone."""
        self._maps.drop_dead()

    def carry(self, pull: Pull) -> None:
        """As the source offers; by gRPC when its memory cannot be reached after all."""
        if not self._attempt_nearby(pull) and not self._attempt(pull, self._transports):
            self._attempt(pull, [GRPC])

    def _attempt_nearby(self, pull: Pull) -> bool:
        """From a neighbour that has all of it in its pages. False: ask by gRPC."""
        raw = self._neighbours.ask(pull, self._request(pull, self._transports).SerializeToString())
        if raw is None:
            return False
        offer = pb.Offer.FromString(raw)
        pull.heard()
        pull.transport = offer.transport
        reader = self._reader(pull, None, offer, pull.places)
        if reader is None:
            return False
        self._read_memory(pull, reader, range(len(pull.places)))
        return True

    def _attempt(self, pull: Pull, transports: Sequence[str]) -> bool:
        """False: the memory that was offered cannot be reached from here."""
        stub = self._stub(pull.request.source_address)
        call = stub.pull(self._request(pull, transports))
        pull.on_end(call.cancel)
        try:
            parts = iter(call)
            offer = decode_offer(next(parts))
            pull.heard()
            pull.transport = offer.transport
            self._neighbours.learn(pull.request.source_address, offer.shared_pool.ask_socket)
            positions = list(offer.in_pages.positions)
            if offer.transport != GRPC:
                reader = self._reader(pull, stub, offer, [pull.places[position] for position in positions])
                if reader is None:
                    call.cancel()
                    return False
                self._read_memory(pull, reader, positions)
            if offer.transport == GRPC or len(positions) < offer.num_units:
                for part in parts:
                    self._store(pull, part)
        except grpc.RpcError as error:
            raise TransferFailed(_reason(pull, error)) from error
        except StopIteration as error:
            raise TransferFailed("the source offered nothing") from error
        missing = len(pull.places) - offer.num_units
        if missing:
            raise TransferFailed(f"the source has {offer.num_units} of {len(pull.places)} units")
        return True

    def _request(self, pull: Pull, transports: Sequence[str]) -> pb.PullRequest:
        return pb.PullRequest(
            source_epoch=pull.request.source_epoch,
            namespace=self._namespace,
            format=self._format,
            unit_hashes=pull.request.unit_hashes,
            host_id=self._host_id,
            transports=transports,
            lease_ms=int(pull.lease_s * 1000),
        )

    def _reader(
        self, pull: Pull, stub: SourceStub | None, offer: pb.Offer, places: Sequence[UnitPlace]
    ) -> MemoryReader | None:
        try:
            if offer.transport == SHM and isinstance(self._kv, HostPages):
                return PoolReader(self._kv, offer, places, self._maps)
            if offer.transport == NIXL and self._endpoint is not None and stub is not None:
                confirm = _confirmation(pull, stub, offer)
                return NixlReader(self._endpoint, offer, places, confirm, lambda: pull.is_ending)
        except (OSError, ValueError) as error:  # another pid namespace, another user, a pool that is gone
            log.info("the source's memory cannot be reached; by gRPC", extra={"reason": str(error)})
        return None

    def _read_memory(self, pull: Pull, reader: MemoryReader, positions: Sequence[int]) -> None:
        num_layers = self._kv.format.num_layers
        layer_bytes = max(1, len(positions)) * 2 * self._kv.format.unit_layer_bytes
        at_once = 1 if self._after_copy else max(1, COPY_BYTES // layer_bytes)
        try:
            for first in range(0, num_layers, at_once):
                layers = range(first, min(first + at_once, num_layers))
                pull.copy(partial(reader.copy, layers))
                if self._after_copy is not None:
                    self._after_copy(layers[-1])
                if reader.sees_generations or layers.stop == num_layers:
                    self._check(reader, layers[-1])
        finally:
            reader.close()
        pull.arrived(positions, num_layers)

    def _check(self, reader: MemoryReader, layer: int) -> None:
        if not reader.unchanged():
            raise TransferFailed(f"layer {layer}: a page got a new owner while it was read")

    def _store(self, pull: Pull, part: bytes) -> None:
        chunk = decode_chunk(part, self._kv.format, len(pull.places))
        for layer, halves in enumerate(chunk.data, chunk.first_layer):
            pull.store(layer, chunk.first_unit, halves.swapaxes(0, 1))

    def _stub(self, address: str) -> SourceStub:
        with self._lock:
            if address not in self._sources:
                while len(self._sources) >= MAX_CHANNELS:
                    self._sources.pop(next(iter(self._sources)))  # it closes when its last pull lets go of it
                channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
                self._sources[address] = channel, SourceStub(channel)
            return self._sources[address][1]


def _confirmation(pull: Pull, stub: SourceStub, offer: pb.Offer) -> Callable[[], bool]:
    request = pb.ConfirmRequest(
        source_epoch=pull.request.source_epoch,
        page_ids=offer.in_pages.page_ids,
        generations=offer.in_pages.generations,
    )
    return lambda: stub.confirm(request, timeout=pull.lease_s).unchanged


def _reason(pull: Pull, error: grpc.RpcError) -> str:
    source = f"source {pull.request.source_worker_id} at {pull.request.source_address}"
    if isinstance(error, grpc.Call):
        return f"{source}: {error.code().name}: {error.details()}"
    return f"{source}: {error!r}"
