"""Both sides of a worker's KV transfer, put together: the puller its executor uses, and what others pull from."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from gpu_worker.executor import Executor
from gpu_worker.transfer.carriers import RemoteCarrier
from gpu_worker.transfer.messages import CHUNK_BYTES
from gpu_worker.transfer.nixl import AddressedPages, NixlEndpoint
from gpu_worker.transfer.port import KvPages, LowerTiers
from gpu_worker.transfer.puller import TransferPuller
from gpu_worker.transfer.source import TransferSource
from gpu_worker.transfer.transports import GRPC, NIXL, TRANSPORTS, available_transports
from wire.ids import WorkerId

log = logging.getLogger("gpu_worker.transfer")


@dataclass(frozen=True, slots=True)
class TransferPlane:
    """A worker without KV has no puller, and gives nothing."""

    kv: KvPages | None
    namespace: str
    tiers: LowerTiers | None
    transports: Sequence[str]
    endpoint: NixlEndpoint | None
    puller: TransferPuller | None

    def source(
        self,
        executor: Executor,
        *,
        after_read: Callable[[int], None] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> TransferSource:
        """What others pull from; after_read, chunk_bytes: see TransferSource."""
        return TransferSource(
            self.kv,
            executor.residency,
            namespace=self.namespace,
            epoch=lambda: executor.epoch,
            transports=self.transports,
            tiers=self.tiers,
            endpoint=self.endpoint,
            after_read=after_read,
            chunk_bytes=chunk_bytes,
        )


@contextmanager
def open_plane(
    kv: KvPages | None,
    *,
    worker_id: WorkerId,
    namespace: str,
    tiers: LowerTiers | None = None,
    only: Sequence[str] = TRANSPORTS,
    after_copy: Callable[[int], None] | None = None,
) -> Iterator[TransferPlane]:
    """To be entered before the executor and the server, and left after them.

    namespace: of prefix hashes (kvstore.prefix_hash). only: transports to use of those there are; gRPC always is.
    after_copy: see RemoteCarrier.
    """
    if kv is None:
        yield TransferPlane(None, namespace, None, (GRPC,), None, None)
        return
    transports = available_transports(kv, only)
    endpoint = _open_nixl(kv) if NIXL in transports else None
    if endpoint is None:
        transports = tuple(name for name in transports if name != NIXL)
    remote = RemoteCarrier(kv, namespace=namespace, transports=transports, endpoint=endpoint, after_copy=after_copy)
    try:
        with TransferPuller(kv, remote, worker_id=worker_id, tiers=tiers) as puller:
            yield TransferPlane(kv, namespace, tiers, transports, endpoint, puller)
    finally:
        if endpoint is not None:
            endpoint.close()


def _open_nixl(kv: KvPages) -> NixlEndpoint | None:
    if not hasattr(kv, "half_addresses"):
        return None
    try:
        return NixlEndpoint(cast(AddressedPages, kv))
    except Exception as error:  # installed, and yet without a backend or driver that works here
        log.warning("NIXL cannot be used: %s", error)
        return None
