"""The port to CUDA graphs (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs), and its CUDA side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class RecordedGraph(Protocol):
    """Work on the device, recorded once: the same kernels on the same addresses at every replay."""

    @property
    def output(self) -> torch.Tensor:
        """What the recorded function returned; a replay writes it again. Valid until any graph's next replay."""
        ...

    def replay(self) -> None:
        """Run it in stream order, on whatever its input tensors hold now."""
        ...


class GraphRecorder(Protocol):
    """Records graphs that share one memory pool, so only one of them may be under way at a time."""

    def record(self, run: Callable[[], torch.Tensor]) -> RecordedGraph:
        """Run once to warm up, then record. `run` must neither read the device nor depend on the host's state."""
        ...

    def memory_bytes(self) -> int:
        """Device memory that recording has taken so far."""
        ...


@dataclass(frozen=True, slots=True)
class CudaGraph:
    output: torch.Tensor
    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


class CudaGraphRecorder:
    """Not run on a GPU yet."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._free_at_start = torch.cuda.mem_get_info(device)[0]

    def record(self, run: Callable[[], torch.Tensor]) -> CudaGraph:
        # Libraries make their workspaces and choose their kernels in the warm-up: neither may happen in a capture.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = run()
        return CudaGraph(output, graph)

    def memory_bytes(self) -> int:
        return self._free_at_start - torch.cuda.mem_get_info(self._device)[0]
