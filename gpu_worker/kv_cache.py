"""The paged KV tensors of one worker. Who owns which page is the scheduler's business; here are only the bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.kv_format import KVFormat
from gpu_worker.model_config import DecoderConfig
from gpu_worker.transfer.device_pages import DevicePages
from gpu_worker.transfer.host_pages import CopyRuns, HostPages
from gpu_worker.transfer.port import KvFormat, KvPages
from gpu_worker.transfer.shared_pool import SharedPool
from wire.errors import ConfigInvalid
from wire.ids import UNIT_TOKENS
from wire.plan import PageCopy


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of K and of V: [num_layers, num_pages, page_size, num_kv_heads, row_size]; page_size in tokens."""

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    row_size: int
    """Stored elements of one token and head: head_dim, and a scale where the format has one."""
    kv_format: KVFormat

    @classmethod
    def sized(
        cls, config: DecoderConfig, *, page_size: int, kv_format: KVFormat, num_pages: int | None, memory_bytes: int
    ) -> KVLayout:
        """`num_pages` if given, else as many pages as `memory_bytes` holds. Raises ConfigInvalid below two pages."""
        row_size = kv_format.row_size(config.head_dim)
        one_page = cls(config.num_layers, 1, page_size, config.num_kv_heads, row_size, kv_format)
        pages = memory_bytes // one_page.total_bytes if num_pages is None else num_pages
        if pages < 2:
            variable = "PHASEMESH_KV_MEMORY_MB" if num_pages is None else "PHASEMESH_KV_PAGES"
            raise ConfigInvalid(
                f"{variable}: {pages} KV pages of {one_page.total_bytes} bytes each; at least 2 are needed",
                param=variable,
            )
        return cls(config.num_layers, pages, page_size, config.num_kv_heads, row_size, kv_format)

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.kv_format.stored_dtype

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return self.num_layers, self.num_pages, self.page_size, self.num_kv_heads, self.row_size

    @property
    def total_bytes(self) -> int:
        """Of K and V together."""
        slots = self.num_layers * self.num_pages * self.page_size
        return 2 * slots * self.num_kv_heads * self.row_size * self.dtype.itemsize

    @property
    def transfer_format(self) -> KvFormat:
        """How units of these pages are stored, for whoever might exchange them."""
        return KvFormat(
            dtype=self.kv_format.name,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            row_size=self.row_size,
            element_bytes=self.dtype.itemsize,
            unit_tokens=UNIT_TOKENS,
        )


class KVCache:
    """K and V, each [num_layers, num_pages, page_size, num_kv_heads, row_size]. `transfers`: the same, by unit."""

    def __init__(self, layout: KVLayout, device: torch.device, *, copy_runs: CopyRuns | None = None) -> None:
        """copy_runs: copies for transfers, on a CPU. Raises ConfigInvalid when the device has no such memory."""
        self.layout = layout
        try:
            self.keys, self.values, self.transfers = _zeros(layout, device, copy_runs)
        except (OSError, RuntimeError) as error:
            raise ConfigInvalid(
                f"PHASEMESH_KV_MEMORY_MB or PHASEMESH_KV_PAGES: no {layout.total_bytes / 2**30:.1f} GiB on {device}",
                param="PHASEMESH_KV_MEMORY_MB",
            ) from error
        by_slot = (layout.num_layers, layout.num_pages * layout.page_size, layout.num_kv_heads, layout.row_size)
        self._key_slots = self.keys.view(by_slot)
        self._value_slots = self.values.view(by_slot)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values [num_tokens, num_kv_heads, head_dim] at slots [num_tokens] (page * size + offset)."""
        encode = self.layout.kv_format.encode
        self._key_slots[layer].index_copy_(0, slots, encode(keys))
        self._value_slots[layer].index_copy_(0, slots, encode(values))

    def pages(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer as stored, each [num_pages, page_size, num_kv_heads, row_size]."""
        return self.keys[layer], self.values[layer]

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy slots [0, num_slots) of source to target, in every layer, one copy after the other."""
        for copy in copies:
            for tensor in (self.keys, self.values):
                tensor[:, copy.target_page, : copy.num_slots] = tensor[:, copy.source_page, : copy.num_slots]


def _zeros(
    layout: KVLayout, device: torch.device, copy_runs: CopyRuns | None
) -> tuple[torch.Tensor, torch.Tensor, KvPages]:
    """K, V, and both for transfers. Zeros, not garbage: attention multiplies masked slots by 0, and 0 * NaN is NaN."""
    if device.type != "cpu":
        keys, values = (torch.zeros(layout.shape, dtype=layout.dtype, device=device) for _ in range(2))
        return keys, values, DevicePages(layout.transfer_format, keys, values)
    pool = SharedPool(layout.num_pages, layout.total_bytes // 2)
    keys, values = (
        torch.frombuffer(pool.buffer, dtype=layout.dtype, offset=offset, count=math.prod(layout.shape)).view(
            layout.shape
        )
        for offset in (pool.layout.keys, pool.layout.values)
    )
    return keys, values, HostPages(layout.transfer_format, layout.page_size, pool, copy_runs=copy_runs)
