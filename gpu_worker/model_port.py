"""The port through which an executor runs a model: torch_runner.py, kernels/decoder.py on CPUs, cuda/runner.py on GPUs,
simulated_runner.py.

A runner takes a step from batch to tokens: where logits live, who draws from them and how is its own affair, so one
may sample on its device, and one without a model need not make logits at all. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.port import KvPages
from wire.plan import ModelCard, PageCopy
from wire.sampling import TokenLogprobs


@dataclass(slots=True)
class Sampled:
    """token None: the logits hold no usable number, and the sequence cannot go on."""

    token: int | None
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class StepOutput:
    """What one step gave, on the host."""

    sampled: list[Sampled]
    """[len(batch.logit_rows)], in that order."""
    sample_us: int
    """Of the step, what came after the forward pass. On an accelerator that returns early, the wait for it too."""


class ModelRunner(Protocol):
    """A model with its KV pages. Not thread-safe: one caller, one step at a time."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int:
        """Tokens (slots) per page."""
        ...

    @property
    def kv(self) -> KvPages | None:
        """The same pages for transfers, which run beside the steps; None: it neither gives nor takes KV."""
        ...

    def compute_thread(self) -> AbstractContextManager[object]:
        """Entered by the thread that steps, around all of its steps: for settings that belong to a thread."""
        ...

    def step(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> StepOutput:
        """Write the KV of every token of `batch` and draw the next token of each sequence in `sampling`.

        Sequence i of `sampling` owns row batch.logit_rows[i]; with none, the KV is still written. A draw follows
        gpu_worker/sampler.py: a function of the row's logits, the sequence's parameters and (seed, choice, output
        position), whatever else is in the batch.
        """
        ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        """Copy slots [0, num_slots) of each source page to its target page, in every layer, in order."""
        ...


class PendingStep(Protocol):
    """A step under way on a device."""

    def result(self) -> StepOutput:
        """Wait for it. To be called once, in the order of the launches."""
        ...


@runtime_checkable
class PipelinedRunner(ModelRunner, Protocol):
    """A runner whose device works while the host prepares: the next step may be launched before this one is read."""

    def launch(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> PendingStep:
        """Begin a step, as `step` does, after all that were launched before. Takes `batch.fed_rows`."""
        ...
