"""KV pages on an accelerator as transfers see them: through pinned memory, on a stream of their own.

Not run on a GPU yet.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.transfer.port import Bytes, Generations, KvFormat, UnitPlace


class DevicePages:
    """Implements gpu_worker.transfer.port.KvPages over K and V tensors, each
    [num_layers, num_pages, page_size, num_kv_heads, row_size].

    The side stream waits for what the compute stream was given before (a page's copy, the last step of its earlier
    owner), and the host for the side stream: when a call returns, the bytes have moved.
    """

    def __init__(self, kv_format: KvFormat, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.format = kv_format
        self._device = keys.device
        self._units_per_page = keys.shape[2] // kv_format.unit_tokens
        by_unit = (kv_format.num_layers, -1, kv_format.unit_layer_bytes)
        self._halves = [half.view(torch.uint8).view(by_unit) for half in (keys, values)]
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()  # one staging buffer's worth at once
        self._generations = [0] * keys.shape[1]

    @property
    def unit_bytes(self) -> int:
        return self.format.unit_bytes

    @property
    def generations(self) -> Generations:
        return self._generations

    @property
    def memory_kind(self) -> str:
        return "VRAM"

    @property
    def device_id(self) -> int:
        return self._device.index or 0

    @property
    def half_addresses(self) -> tuple[int, int]:
        """Of K, and of V."""
        keys, values = (half.data_ptr() for half in self._halves)
        return keys, values

    @property
    def half_bytes(self) -> int:
        return self._halves[0].nbytes

    @torch.no_grad()
    def read(self, layer: int, places: Sequence[UnitPlace]) -> Bytes:
        """A copy of one layer of units: [len(places), 2 (K, V), unit_layer_bytes]."""
        shape = (len(places), 2, self.format.unit_layer_bytes)
        pinned = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            units = self._units(places)
            pinned.copy_(torch.stack([half[layer][units] for half in self._halves], dim=1), non_blocking=True)
            self._stream.synchronize()
        return pinned.numpy()

    def pieces(self, layer: int, places: Sequence[UnitPlace]) -> list[Bytes]:
        """One layer of units, [2 (K, V), len(places), unit_layer_bytes], as one piece."""
        return [np.ascontiguousarray(self.read(layer, places).swapaxes(0, 1))]

    @torch.no_grad()
    def write(self, layer: int, places: Sequence[UnitPlace], data: Bytes) -> None:
        """Store one layer of units, as `read` gave it; done when this returns."""
        pinned = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
        pinned.numpy()[:] = data
        with self._lock, torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            units = self._units(places)
            staged = pinned.to(self._device, non_blocking=True)
            for half, tensor in enumerate(self._halves):
                tensor[layer].index_copy_(0, units, staged[:, half])
            self._stream.synchronize()

    def unit_index(self, place: UnitPlace) -> int:
        """Where a unit lies among all units of a layer."""
        return place.page_id * self._units_per_page + place.index

    def _units(self, places: Sequence[UnitPlace]) -> torch.Tensor:
        return torch.tensor([self.unit_index(place) for place in places], device=self._device)
