"""Units out of another worker's memory by NIXL: one-sided reads over whatever NIXL finds between the two.

Written to NIXL's Python API; run against a stand-in with its call shape only, not over NIXL itself.
"""

from __future__ import annotations

import importlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, Protocol, TypeAlias

from gpu_worker.transfer.host_pages import common_runs
from gpu_worker.transfer.port import KvPages, UnitPlace
from wire import transfer_pb2 as pb
from wire.errors import TransferFailed

_POLL_S = 0.0002
_Region: TypeAlias = tuple[int, int, int]
"""Address, bytes, device."""


class AddressedPages(KvPages, Protocol):
    """Pages whose K and V, each [num_layers, units of a layer, unit_layer_bytes], lie at known addresses."""

    @property
    def memory_kind(self) -> str:
        """DRAM | VRAM."""
        ...

    @property
    def device_id(self) -> int: ...

    @property
    def half_addresses(self) -> tuple[int, int]:
        """Of K, and of V."""
        ...

    @property
    def half_bytes(self) -> int: ...

    def unit_index(self, place: UnitPlace) -> int:
        """Where a unit lies among all units of a layer."""
        ...


class NixlEndpoint:
    """This worker's agent, its pages registered: gives offers, and reads what others offer."""

    def __init__(self, pages: AddressedPages) -> None:
        self.pages = pages
        nixl = importlib.import_module("nixl._api")
        self.agent: Any = nixl.nixl_agent(f"phasemesh-{secrets.token_hex(8)}")
        regions = [(address, pages.half_bytes, pages.device_id, "") for address in pages.half_addresses]
        self._registered = self.agent.register_memory(regions, mem_type=pages.memory_kind)
        self.lock = threading.Lock()  # around every call: an agent is not said to be thread-safe
        self._readers: Counter[bytes] = Counter()  # of each remote agent, by its metadata
        self._remotes: dict[bytes, Any] = {}

    def offer(self) -> pb.NixlAgent:
        keys, values = self.pages.half_addresses
        return pb.NixlAgent(
            metadata=self.agent.get_agent_metadata(),
            memory_kind=self.pages.memory_kind,
            device_id=self.pages.device_id,
            keys_address=keys,
            values_address=values,
            half_bytes=self.pages.half_bytes,
        )

    def add_remote(self, metadata: bytes) -> Any:
        """The name of a remote agent, which several pulls may read from at once."""
        with self.lock:
            if not self._readers[metadata]:
                self._remotes[metadata] = self.agent.add_remote_agent(metadata)
            self._readers[metadata] += 1
            return self._remotes[metadata]

    def remove_remote(self, metadata: bytes) -> None:
        """Undo one add_remote."""
        with self.lock:
            self._readers[metadata] -= 1
            if not self._readers[metadata]:
                self.agent.remove_remote_agent(self._remotes.pop(metadata))

    def close(self) -> None:
        with self.lock:
            self.agent.deregister_memory(self._registered)


class NixlReader:
    """Implements gpu_worker.transfer.transports.MemoryReader."""

    sees_generations = False

    def __init__(
        self,
        endpoint: NixlEndpoint,
        offer: pb.Offer,
        places: Sequence[UnitPlace],
        confirm: Callable[[], bool],
        stopped: Callable[[], bool],
    ) -> None:
        """places: of the offered units, in their order. confirm: asks the source about its generations. stopped: the
        pull is over, so that nobody waits on."""
        self._pages = endpoint.pages
        self._endpoint = endpoint
        self._agent = endpoint.agent
        self._there = offer.nixl
        indices = [self._pages.unit_index(place) for place in places]
        self._pieces = common_runs(indices, offer.in_pages.unit_indices)
        self._confirm = confirm
        self._stopped = stopped
        self._remote = endpoint.add_remote(self._there.metadata)

    def copy(self, layers: range) -> None:
        """Bring these layers of the offered units to where they go. Raises TransferFailed."""
        unit = self._pages.format.unit_layer_bytes
        num_layers = self._pages.format.num_layers
        here, there = self._pages.half_addresses, (self._there.keys_address, self._there.values_address)
        local, remote = [], []
        for layer, half in product(layers, (0, 1)):
            ours = here[half] + layer * (self._pages.half_bytes // num_layers)
            theirs = there[half] + layer * (self._there.half_bytes // num_layers)
            for target, source, count in self._pieces:
                local.append((ours + target * unit, count * unit, self._pages.device_id))
                remote.append((theirs + source * unit, count * unit, self._there.device_id))
        self._read(local, remote)

    def _read(self, local: list[_Region], remote: list[_Region]) -> None:
        """Returns, or raises TransferFailed, when nothing is written here any more."""
        with self._endpoint.lock:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(local, mem_type=self._pages.memory_kind),
                self._agent.get_xfer_descs(remote, mem_type=self._there.memory_kind),
                self._remote,
            )
            state = self._agent.transfer(handle)
        while state == "PROC":
            if self._stopped() and self._aborted(handle):
                raise TransferFailed("nixl: the pull ended before its read did")
            time.sleep(_POLL_S)
            with self._endpoint.lock:
                state = self._agent.check_xfer_state(handle)
        with self._endpoint.lock:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise TransferFailed(f"nixl: a read ended in state {state}")

    def _aborted(self, handle: Any) -> bool:
        """Releasing a transfer under way aborts it, where its backend can; where not, it must be waited for."""
        try:
            with self._endpoint.lock:
                self._agent.release_xfer_handle(handle)
        except Exception:  # NIXL's own, one for each backend's way of refusing
            return False
        return True

    def unchanged(self) -> bool:
        """As the source says: its generations are not seen from here."""
        return self._confirm()

    def close(self) -> None:
        self._endpoint.remove_remote(self._there.metadata)
