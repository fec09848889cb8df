"""What src/draw.h is told of a row: how its logits change, and how its token is drawn."""

from __future__ import annotations

from array import array
from math import inf
from typing import Any

import torch

from gpu_worker.kernels import structs
from gpu_worker.kernels.structs import place
from gpu_worker.sampler import DrawnRow

_SCRATCH_DOUBLES = 5
"""A column and thread: src/draw.h."""


class LogitChanges:
    """Bias, mask and penalties of a row, as gpu_worker.sampler.adjusted applies them: one column and value each.

    added | scaled: positive logits divided, others multiplied | added
    """

    def __init__(self, row: DrawnRow) -> None:
        sequence, params = row.sequence, row.sequence.sampling
        self.columns, self.values = array("q"), array("d")
        self._extend([(column, bias) for column, bias in params.logit_bias])
        self._extend([(column, -inf) for column in row.masked])
        self.scaled_from = len(self.columns)
        if params.repetition_penalty != 1.0:
            self._extend([(column, params.repetition_penalty) for column in set(sequence.token_ids)])
        self.scaled_to = len(self.columns)
        presence, frequency = params.presence_penalty, params.frequency_penalty
        if presence != 0.0 or frequency != 0.0:
            counts = sequence.output_counts()
            self._extend([(column, -(presence + frequency * times)) for column, times in counts.items()])

    def _extend(self, changes: list[tuple[int, float]]) -> None:
        self.columns.extend([column for column, _ in changes])
        self.values.extend([value for _, value in changes])


def draw_scratch_shape(columns: int) -> tuple[int, int]:
    return torch.get_num_threads(), _SCRATCH_DOUBLES * columns


def draw_scratch(columns: int) -> torch.Tensor:
    """For drawing from rows of so many columns, on each thread."""
    return torch.empty(draw_scratch_shape(columns), dtype=torch.float64)


def draw_struct(row: DrawnRow, changes: LogitChanges) -> Any:
    """Valid while both live."""
    logits, params = row.logits, row.sequence.sampling
    assert logits.dtype == torch.float32 and logits.is_contiguous()
    return structs.made(
        structs.Draw,
        logits=logits.data_ptr(),
        changed=place(changes.columns),
        changes=place(changes.values),
        scaled_from=changes.scaled_from,
        scaled_to=changes.scaled_to,
        num_changes=len(changes.columns),
        temperature=params.temperature,
        top_p=params.top_p,
        min_p=params.min_p,
        uniform=row.uniform,
        top_k=params.top_k,
    )
