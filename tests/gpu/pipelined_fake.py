"""tests/worker's fake model as a pipelined runner, which keeps a log of launches and reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpu_worker.cuda.device_sampler import SampleRow, sample_on_device
from gpu_worker.model_port import Sampled, StepOutput
from gpu_worker.sequences import LiveSequence
from gpu_worker.step_batch import StepBatch
from tests.worker.fake_runner import FakeRunner


class FakePending:
    def __init__(self, read: Callable[[], StepOutput]) -> None:
        self.result = read


class PipelinedFakeRunner(FakeRunner):
    """Implements gpu_worker.model_port.PipelinedRunner. fed tokens are taken from the last launch, never from lists."""

    log: list[tuple[str, int]]
    """("launch" or "read", number of the step), in order."""

    def __init__(self) -> None:
        super().__init__()
        self.log = []
        self.batches: list[StepBatch] = []
        self._last_tokens: list[int] = []

    def launch(self, batch: StepBatch, sampling: Sequence[LiveSequence]) -> FakePending:
        number = len(self.batches)
        self.log.append(("launch", number))
        self.batches.append(batch)
        for row, source in batch.fed_rows:
            assert batch.token_ids[row] == 0  # a placeholder
            batch.token_ids[row] = self._last_tokens[source]
        logits = self.forward(batch)
        sampled: list[Sampled] = []
        if sampling:
            rows = [
                SampleRow(s, batch.positions[row] + 1 - s.num_prompt_tokens)
                for row, s in zip(batch.logit_rows, sampling, strict=True)
            ]
            samples = sample_on_device(logits, rows, self.card)
            self._last_tokens = samples.tokens.tolist()
            pairs = zip(self._last_tokens, samples.sound.tolist(), strict=True)
            sampled = [Sampled(token if ok else None) for token, ok in pairs]

        def read() -> StepOutput:
            self.log.append(("read", number))
            return StepOutput(sampled, 0)

        return FakePending(read)

    @property
    def steps_ahead(self) -> int:
        """Steps launched before the one before them was read."""
        launched = {n: place for place, (kind, n) in enumerate(self.log) if kind == "launch"}
        read = {n: place for place, (kind, n) in enumerate(self.log) if kind == "read"}
        return sum(n > 0 and place < read.get(n - 1, len(self.log)) for n, place in launched.items())
