"""Decode steps as CUDA graphs: one launch for a whole forward pass, instead of a dozen a layer.

a step's lists ─▸ padded, one pinned block ─▸ static inputs ─▸ replay ─▸ static logits, rows beyond the step ignored
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpu_worker.cuda.buckets import Bucket, fitting, padded_inputs
from gpu_worker.cuda.graph_port import GraphRecorder, RecordedGraph
from gpu_worker.step_batch import StepBatch
from gpu_worker.upload import upload

log = logging.getLogger("gpu_worker.cuda.decode_graphs")


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """A decode step on the device, int32; the tensors a graph was recorded over, or others of the same shapes."""

    token_ids: torch.Tensor  # [num_seqs]
    positions: torch.Tensor  # [num_seqs]
    slots: torch.Tensor  # [num_seqs]
    context_lens: torch.Tensor  # [num_seqs]
    block_table: torch.Tensor  # [num_seqs, width]


@dataclass(frozen=True, slots=True)
class CaptureBudget:
    """Capture ends when either is spent; the graphs made by then, the largest, serve the smaller steps too."""

    time_s: float = 30.0
    memory_bytes: int = 2 << 30


class DecodeGraphs:
    """The graphs of one model and its KV pages. Not thread-safe.

    spare_page: a page of the KV tensors that no sequence is ever given; padding rows write there.
    """

    def __init__(self, recorder: GraphRecorder, *, device: torch.device, spare_page: int, page_size: int) -> None:
        self._recorder = recorder
        self._device = device
        self._spare_page = spare_page
        self._page_size = page_size
        self._inputs = torch.empty(0, dtype=torch.int32, device=device)
        self._graphs: dict[Bucket, RecordedGraph] = {}

    @property
    def captured(self) -> list[Bucket]:
        """Largest first."""
        return sorted(self._graphs, reverse=True)

    def capture(
        self,
        wanted: list[Bucket],
        forward: Callable[[DecodeInputs], torch.Tensor],
        budget: CaptureBudget,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record `forward`, from inputs to logits [num_seqs, vocab_size], at every wanted size, in the given order.

        Must run before any step, outside inference mode: the static tensors outlive it.
        """
        started_s = clock()
        longest = max((bucket.num_inputs for bucket in wanted), default=0)
        self._inputs = torch.empty(longest, dtype=torch.int32, device=self._device)
        nothing = StepBatch()
        for bucket in wanted:
            if clock() - started_s >= budget.time_s or self._recorder.memory_bytes() >= budget.memory_bytes:
                log.warning("capture budget spent", extra={"captured": len(self._graphs), "wanted": len(wanted)})
                break
            self._fill(nothing, bucket)  # all rows padding: recording runs the step, and may touch nobody's pages
            views = self._views(bucket)
            self._graphs[bucket] = self._recorder.record(lambda views=views: forward(views))  # type: ignore[misc]
        log.info("captured", extra={"graphs": len(self._graphs), "seconds": round(clock() - started_s, 1)})

    def run(self, batch: StepBatch, feed: Callable[[torch.Tensor], None]) -> torch.Tensor | None:
        """Logits float32 [num_seqs, vocab_size] of a step that a graph holds, valid until the next run; else None.

        feed: puts what only the device knows into the step's token ids [num_seqs], in place.
        """
        bucket = fitting(self._graphs, batch)
        if bucket is None:
            return None
        self._fill(batch, bucket)
        feed(self._inputs[: len(batch.token_ids)])
        graph = self._graphs[bucket]
        graph.replay()
        return graph.output[: len(batch.token_ids)]

    def _fill(self, batch: StepBatch, bucket: Bucket) -> None:
        inputs = padded_inputs(batch, bucket, spare_page=self._spare_page, page_size=self._page_size)
        self._inputs[: bucket.num_inputs].copy_(upload(inputs, torch.int32, self._device))

    def _views(self, bucket: Bucket) -> DecodeInputs:
        n = bucket.num_seqs
        token_ids, positions, slots, context_lens = self._inputs[: 4 * n].view(4, n).unbind()
        table = self._inputs[4 * n : bucket.num_inputs].view(n, bucket.width)
        return DecodeInputs(token_ids, positions, slots, context_lens, table)
