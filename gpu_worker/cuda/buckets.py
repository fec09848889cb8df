"""Which sizes of a decode step are captured as CUDA graphs, and how a step is padded to one. Pure.

A graph is fixed in two sizes: sequences, and pages of a block-table row. The second matters because attention kernels
divide their work over a GPU by the table's width: a table far wider than the contexts leaves most of it idle.

    one step's inputs, int32, n = bucket.num_seqs, w = bucket.width
    | token_ids n | positions n | slots n | context_lens n | block tables n × w, row by row |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpu_worker.step_batch import StepBatch

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Sequences. A step is padded to at most twice its rows, which a step bound by reading weights hardly feels."""
WIDTH_RATIO = 4
SMALLEST_WIDTH = 4


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """A captured step's size."""

    num_seqs: int
    width: int
    """Pages of a block-table row."""

    @property
    def num_inputs(self) -> int:
        return self.num_seqs * (4 + self.width)


def buckets(max_seqs: int, max_width: int) -> list[Bucket]:
    """What to capture, largest first: later graphs then fit into the memory the first one took.

    max_seqs: sequences that can decode at once; max_width: pages of the longest context.
    """
    sizes = [size for size in SIZES if size < max_seqs] + [min(max_seqs, SIZES[-1])]
    widths = [max_width]
    while widths[-1] > SMALLEST_WIDTH:
        widths.append(max(SMALLEST_WIDTH, -(-widths[-1] // WIDTH_RATIO)))
    return sorted({Bucket(size, width) for size in sizes for width in widths}, reverse=True)


def fitting(captured: Iterable[Bucket], batch: StepBatch) -> Bucket | None:
    """The smallest captured bucket that holds a step; None when it must run without a graph.

    Graphs hold steps of decodes whose every row is sampled, in order.
    """
    num_seqs = len(batch.query_lens)
    if len(batch.token_ids) != num_seqs or batch.logit_rows != list(range(num_seqs)):
        return None
    width = max((len(table) for table in batch.block_tables), default=0)
    holding = (b for b in captured if b.num_seqs >= num_seqs and b.width >= width)
    return min(holding, default=None)


def padded_inputs(batch: StepBatch, bucket: Bucket, *, spare_page: int, page_size: int) -> list[int]:
    """The step's inputs, padded to the bucket.

    A padding row is a sequence of one token in the spare page, which belongs to nobody: all of them write its first
    slot, and what they compute is ignored. A short table goes on with the spare page, which attention never counts.
    """
    padding = bucket.num_seqs - len(batch.token_ids)
    inputs = [
        *(batch.token_ids + [0] * padding),
        *(batch.positions + [0] * padding),
        *(batch.slot_mapping + [spare_page * page_size] * padding),
        *(batch.context_lens + [1] * padding),
    ]
    for table in batch.block_tables:
        inputs += table
        inputs += [spare_page] * (bucket.width - len(table))
    return inputs + [spare_page] * (bucket.width * padding)
