"""Units out of a neighbour's memory, on one host: its pool is mapped, and each run of units copied once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gpu_worker.transfer.host_pages import HostPages, pool_units
from gpu_worker.transfer.messages import decode_pool
from gpu_worker.transfer.port import UnitPlace
from gpu_worker.transfer.shared_pool import PoolAddress, PoolLayout, open_pool
from wire import transfer_pb2 as pb

MAX_MAPPED = 32
"""Neighbours whose pools stay mapped between pulls."""


class PoolMaps:
    """Mapped pools, kept while their processes live: mapping anew, a pull would take more than twice as long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: OrderedDict[PoolAddress, memoryview] = OrderedDict()

    def get(self, address: PoolAddress, layout: PoolLayout) -> memoryview:
        """Raises OSError or ValueError as open_pool does."""
        with self._lock:
            pool = self._maps.get(address)
            if pool is None:
                pool = self._maps[address] = open_pool(address, layout)
            self._maps.move_to_end(address)
            while len(self._maps) > MAX_MAPPED:
                self._maps.popitem(last=False)
            return pool

    def clear(self) -> None:
        with self._lock:
            self._maps.clear()

    def drop_dead(self) -> None:
        """Unmap those whose process is gone, for their memory is not freed before."""
        with self._lock:
            for address in [address for address in self._maps if not Path(f"/proc/{address.pid}").exists()]:
                del self._maps[address]


class PoolReader:
    """Implements gpu_worker.transfer.transports.MemoryReader."""

    sees_generations = True

    def __init__(self, pages: HostPages, offer: pb.Offer, places: Sequence[UnitPlace], maps: PoolMaps) -> None:
        """places: of the offered units, in their order. Raises OSError or ValueError when the pool that `offer` names
        cannot be mapped."""
        address, layout = decode_pool(offer.shared_pool)
        pool = maps.get(address, layout)
        self._copier = pages.copier(places, pool_units(pages.format, layout, pool), [*offer.in_pages.unit_indices])
        self._page_ids = np.array([*offer.in_pages.page_ids], np.int64)
        self._offered = np.array([*offer.in_pages.generations], np.uint64)
        self._generations = np.frombuffer(pool, np.uint64, layout.num_pages, layout.generations)

    def copy(self, layers: range) -> None:
        """Bring these layers of the offered units to where they go."""
        self._copier.copy(layers)

    def unchanged(self) -> bool:
        """No page of the offer got a new owner so far."""
        return bool((self._generations[self._page_ids] == self._offered).all())

    def close(self) -> None:
        """The mapping stays, for the next pull, and for as long as PoolMaps wants it: not for some traceback's sake."""
        del self._copier, self._generations
