"""CUDA graphs' semantics on the CPU: operators recorded once with their very tensors, replayed on the same memory.

As on a GPU, what the host decided while recording is frozen, reading a value of the device is refused, and all graphs
share one pool: a replay spoils the outputs of every other graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

POISON = float("nan")


def storages(tree: object) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}


@dataclass
class Call:
    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Any

    def replay(self) -> None:
        again = self.operator(*self.args, **self.kwargs)
        if self.operator._schema.is_mutable:
            return
        for old, new in zip(tree_leaves(self.outputs), tree_leaves(again), strict=True):
            old.copy_(new)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            raise AssertionError(f"{func} makes the host wait for the device: no graph can hold it")
        outputs = func(*args, **(kwargs or {}))
        is_view = not func._schema.is_mutable and storages(outputs) & storages((args, kwargs))
        if not is_view:
            self.calls.append(Call(func, args, kwargs or {}, outputs))
        return outputs


@dataclass
class RecordedCalls:
    output: torch.Tensor
    calls: list[Call]
    pool: list[RecordedCalls]
    num_replays: int = 0

    def replay(self) -> None:
        for graph in self.pool:
            graph.output.fill_(POISON)
        for call in self.calls:
            call.replay()
        self.num_replays += 1


@dataclass
class CpuGraphRecorder:
    """Implements gpu_worker.cuda.graph_port.GraphRecorder."""

    bytes_per_graph: int = 1
    graphs: list[RecordedCalls] = field(default_factory=list)

    def record(self, run: Callable[[], torch.Tensor]) -> RecordedCalls:
        run()
        with _Recording() as recording:
            output = run()
        graph = RecordedCalls(output, recording.calls, self.graphs)
        self.graphs.append(graph)
        return graph

    def memory_bytes(self) -> int:
        return self.bytes_per_graph * len(self.graphs)
