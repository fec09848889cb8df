"""Small results from the device to the host while the device goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class CopyOut(Protocol):
    def start(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        """Copy tensors as they stand in stream order; the function returned waits for the copies and gives them."""
        ...


class HostCopy:
    """Where device and host are one."""

    def start(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies


class SideStreamCopy:
    """On a stream of its own, so that the host waits for these tensors and not for what was launched after them.

    Not run on a GPU yet.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in zip(tensors, pinned, strict=True):
                target.copy_(source, non_blocking=True)
                source.record_stream(self._stream)  # its memory is not given out again before this copy
            done.record(self._stream)

        def wait() -> list[torch.Tensor]:
            done.synchronize()
            return pinned

        return wait
