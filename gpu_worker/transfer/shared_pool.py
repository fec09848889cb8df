"""The memory of a CPU worker's KV pool: a file that only its descriptors name, so that a neighbour may map it.

| header: token, sizes | generations, u64 a page | K | V |        each part begins at a multiple of 4096
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import weakref
from dataclasses import dataclass

from gpu_worker.transfer.port import Generations

_ALIGN = 4096
_HEADER = struct.Struct("<8s16sQQQ")  # magic, token, num_pages, half_bytes, total size
_MAGIC = b"pm-kv-01"
TOKEN_BYTES = 16


@dataclass(frozen=True, slots=True)
class PoolAddress:
    """Where another process of this host finds a pool. The token tells that it is this one, and not whatever has the
    same process id and descriptor by now."""

    pid: int
    descriptor: int
    token: bytes


class PoolLayout:
    """Offsets in a pool of num_pages pages; half_bytes: of K, and of V."""

    def __init__(self, num_pages: int, half_bytes: int) -> None:
        self.num_pages = num_pages
        self.half_bytes = half_bytes
        self.generations = _ALIGN
        self.keys = self.generations + _aligned(8 * num_pages)
        self.values = self.keys + _aligned(half_bytes)
        self.total = self.values + _aligned(half_bytes)


class SharedPool:
    """A pool of this process's: zeros, which cost nothing until written."""

    def __init__(self, num_pages: int, half_bytes: int) -> None:
        """Raises OSError when there is no such memory."""
        self.layout = PoolLayout(num_pages, half_bytes)
        self.address: PoolAddress | None = None
        self.buffer = self._map()
        # Small pages: a KV page has a place in every layer, and the first write into it would wait for a huge one to
        # be cleared in each.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self.buffer.madvise(mmap.MADV_NOHUGEPAGE)
        first = self.layout.generations
        self.generations: Generations = memoryview(self.buffer)[first : first + 8 * num_pages].cast("Q")

    def _map(self) -> mmap.mmap:
        """Anonymous where the system has no such files: then nobody can map it, and units go by gRPC."""
        if not hasattr(os, "memfd_create"):
            return mmap.mmap(-1, self.layout.total)
        mmap.mmap(-1, self.layout.total).close()  # more than the system has is refused here, a file's at its first use
        descriptor = os.memfd_create("phasemesh-kv", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, self.layout.total)
        buffer = mmap.mmap(descriptor, self.layout.total)
        token = secrets.token_bytes(TOKEN_BYTES)
        buffer[: _HEADER.size] = _HEADER.pack(
            _MAGIC, token, self.layout.num_pages, self.layout.half_bytes, self.layout.total
        )
        self.address = PoolAddress(os.getpid(), descriptor, token)
        return buffer


def open_pool(address: PoolAddress, layout: PoolLayout) -> memoryview:
    """Another process's pool, read-only. Raises OSError when it cannot be opened, ValueError when it is another one.

    What is mapped stays when its process dies: its generations then never change again.
    """
    descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        header = os.pread(descriptor, _HEADER.size, 0)
        expected = _HEADER.pack(_MAGIC, address.token, layout.num_pages, layout.half_bytes, layout.total)
        if header != expected or os.fstat(descriptor).st_size != layout.total:
            raise ValueError(f"process {address.pid}: descriptor {address.descriptor} is not the pool that was offered")
        return memoryview(mmap.mmap(descriptor, layout.total, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
