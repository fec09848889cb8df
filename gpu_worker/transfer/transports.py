"""Which way units go between two workers, and the port of those ways that read the source's memory themselves."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence
from typing import Protocol

from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.port import KvPages

SHM, NIXL, GRPC = "shm", "nixl", "grpc"
TRANSPORTS = (SHM, NIXL, GRPC)
"""Best first."""

_STRONGLY_ORDERED = ("x86_64", "AMD64", "i686")
"""Where a core's loads are seen in order, and so are another's stores: pages, then generations, without a fence of our
own but for the streamed stores of kernels/src/copy.h. Elsewhere units go by gRPC, whose source looks at its generations
under its own lock."""


class MemoryReader(Protocol):
    """Copies units out of the source's memory. One pull's; used by one thread."""

    @property
    def sees_generations(self) -> bool:
        """`unchanged` costs next to nothing: asked after every copy, it spares the rest of a pull that has failed."""
        ...

    def copy(self, layers: range) -> None:
        """Bring these layers of the offered units to where they go. Raises TransferFailed."""
        ...

    def unchanged(self) -> bool:
        """No page that the offer named got a new owner before this call: all that was copied is right. Raises
        TransferFailed when that cannot be known."""
        ...

    def close(self) -> None: ...


def available_transports(kv: KvPages, only: Sequence[str] = TRANSPORTS) -> tuple[str, ...]:
    """Those a worker with these pages can use, best first; grpc always."""
    usable = {
        SHM: isinstance(kv, HostPages) and kv.pool_address is not None and platform.machine() in _STRONGLY_ORDERED,
        NIXL: importlib.util.find_spec("nixl") is not None,
        GRPC: True,
    }
    return tuple(name for name in TRANSPORTS if usable[name] and (name in only or name == GRPC))


def choose_transport(asked: Sequence[str], offered: Sequence[str], *, same_host: bool) -> str:
    """The first of those the puller asks for that the source has too; shared memory on one host only."""
    return next((name for name in asked if name in offered and (name != SHM or same_host)), GRPC)
