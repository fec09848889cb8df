"""The model runner of a GPU: decode graphs where they fit, sampling on the device, tokens read behind the next step.

launch N:  inputs up (pinned) ▸ tokens of N-1 fed in ▸ graph or eager ▸ sample ▸ tokens out (side stream)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gpu_worker.attention.port import GraphableAttention
from gpu_worker.cuda.buckets import buckets
from gpu_worker.cuda.copy_out import CopyOut
from gpu_worker.cuda.decode_graphs import CaptureBudget, DecodeGraphs, DecodeInputs
from gpu_worker.cuda.device_sampler import SampleRow, sample_on_device
from gpu_worker.cuda.graph_port import GraphRecorder
from gpu_worker.kv_cache import KVCache
from gpu_worker.model_config import DecoderConfig
from gpu_worker.model_port import Sampled, StepOutput
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from gpu_worker.torch_runner import LanguageModel, TorchModelRunner
from gpu_worker.upload import upload
from wire.plan import ModelCard
from wire.sampling import TokenLogprobs


@dataclass(frozen=True, slots=True)
class PendingCudaStep:
    """A step whose tokens are on their way to the host."""

    wait: Callable[[], list[torch.Tensor]]
    logprob_counts: dict[int, int]
    """How many likeliest tokens each row that wants log-probabilities wants, by row, in order."""

    def result(self) -> StepOutput:
        """sample_us is 0: one stream runs both parts, and telling them apart would make the device wait."""
        copies = self.wait()
        if not copies:
            return StepOutput([], 0)
        tokens, sound = copies[0].tolist()
        sampled = [Sampled(token if ok else None) for token, ok in zip(tokens, sound, strict=True)]
        if self.logprob_counts:
            rows = copies[1].tolist()
            for (row, count), values in zip(self.logprob_counts.items(), rows, strict=True):
                if sampled[row].token is not None:
                    sampled[row].logprobs = _token_logprobs(values, count)
        return StepOutput(sampled, 0)


def _token_logprobs(values: list[float], count: int) -> TokenLogprobs:
    """values: see DeviceSamples.logprobs."""
    most = (len(values) - 1) // 2
    count = min(count, most)
    return TokenLogprobs(values[0], [int(i) for i in values[1 : 1 + count]], values[1 + most : 1 + most + count])


class CudaModelRunner(TorchModelRunner):
    """Implements gpu_worker.model_port.PipelinedRunner. The last page of `kv_cache` is the graphs' spare page."""

    def __init__(
        self,
        card: ModelCard,
        config: DecoderConfig,
        model: LanguageModel,
        attention: GraphableAttention,
        kv_cache: KVCache,
        copy_out: CopyOut,
        *,
        threads: int | None = None,
    ) -> None:
        super().__init__(card, config, model, attention, kv_cache, threads=threads)
        self.num_pages -= 1
        self._decode_attention = attention
        self._copy_out = copy_out
        self._graphs: DecodeGraphs | None = None
        self._last_tokens = torch.empty(0, dtype=torch.int64, device=self.device)

    @property
    def graphs(self) -> DecodeGraphs | None:
        return self._graphs

    @torch.no_grad()
    def capture(self, recorder: GraphRecorder, budget: CaptureBudget) -> None:
        """Record graphs of decode steps, for steps from now on. Outside inference mode, before the first step."""
        self._graphs = DecodeGraphs(recorder, device=self.device, spare_page=self.num_pages, page_size=self.page_size)
        longest = min(-(-self.card.max_model_len // self.page_size), self.num_pages)
        self._graphs.capture(buckets(self.num_pages, longest), self._decode, budget)

    @contextmanager
    def compute_thread(self) -> Iterator[None]:
        """Entered by the thread that steps, around all of its steps."""
        with super().compute_thread():
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            yield

    def step(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> StepOutput:
        """Write the KV of every token of `batch` and draw the next token of each sequence in `sampling`."""
        return self.launch(batch, sampling).result()

    @torch.no_grad()
    def launch(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> PendingCudaStep:
        """Begin a step after all that were launched before."""
        logits = self.forward(batch)
        if not sampling:
            return PendingCudaStep(list, {})
        rows = [
            SampleRow(sequence, batch.positions[row] + 1 - sequence.num_prompt_tokens)
            for row, sequence in zip(batch.logit_rows, sampling, strict=True)
        ]
        samples = sample_on_device(logits, rows, self.card)
        self._last_tokens = samples.tokens
        results = [torch.stack((samples.tokens, samples.sound.long()))]
        if samples.logprobs is not None:
            results.append(samples.logprobs)
        counts = {row: sampling[row].sampling.logprobs or 0 for row in samples.logprob_rows}
        return PendingCudaStep(self._copy_out.start(results), counts)

    @torch.no_grad()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Logits as TorchModelRunner gives them, valid until the next forward: a replay writes to the same place."""
        if self._graphs is not None:
            logits = self._graphs.run(batch, lambda token_ids: self._feed(batch, token_ids))
            if logits is not None:
                return logits
        return super().forward(batch)

    def _token_ids(self, batch: StepBatch) -> torch.Tensor:
        token_ids = super()._token_ids(batch)
        self._feed(batch, token_ids)
        return token_ids

    def _feed(self, batch: StepBatch, token_ids: torch.Tensor) -> None:
        if batch.fed_rows:
            targets, sources = upload(list(zip(*batch.fed_rows, strict=True)), torch.int64, self.device)
            token_ids.index_copy_(0, targets, self._last_tokens.index_select(0, sources).to(token_ids.dtype))

    def _decode(self, inputs: DecodeInputs) -> torch.Tensor:
        """What a graph records: a step of decodes, from tensors on the device alone."""
        attention = self._decode_attention.decode_step(
            inputs.context_lens, inputs.block_table, page_size=self.page_size, windows=self._windows, dtype=self._dtype
        )
        return self._model(
            inputs.token_ids.long(),
            self._rotary.cos_sin(inputs.positions, self._dtype),
            self._kv_cache,
            inputs.slots.long(),
            attention,
            torch.arange(len(inputs.token_ids), device=self.device),
        )
