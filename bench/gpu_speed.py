"""Decode and prefill against what the device can do, measured in the same run. For bench.gpu_check.

decode   floor = max(bytes a step reads ÷ copy bandwidth, 2 · weights · rows ÷ matmul FLOP/s)
prefill  floor = 2 · weights · tokens ÷ matmul FLOP/s                    attention's own work is not counted
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from bench.gpu_model import num_multiplied, weight_bytes
from bench.gpu_sequences import Sequences
from gpu_worker.cuda.runner import CudaModelRunner
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import DecoderConfig

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """What the device was seen to do."""

    bytes_per_s: float
    """Of a large copy, reads and writes together."""
    flop_per_s: float
    """Of a large square matrix product in the model's type."""


@dataclass(frozen=True, slots=True)
class Speed:
    name: str
    step_s: float
    """Median."""
    tokens_per_s: float
    floor_s: float

    @property
    def ratio(self) -> float:
        """Of the time taken to the least possible."""
        return self.step_s / self.floor_s


def median_s(run: Callable[[], object], device: torch.device, rounds: int = ROUNDS) -> float:
    """Of a call, its work on the device included; the first one warms up."""
    taken = []
    for _ in range(rounds + 1):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_machine(device: torch.device, dtype: torch.dtype, *, copied_bytes: int, side: int) -> Machine:
    source = torch.ones(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), device)
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    return Machine(2 * copied_bytes / copy_s, 2 * side**3 / median_s(lambda: a @ b, device))


class SpeedRun:
    """One model through one runner."""

    def __init__(self, name: str, config: DecoderConfig, model: CausalLM, runner: CudaModelRunner, machine: Machine):
        self._name, self._config, self._runner, self._machine = name, config, runner, machine
        self._weight_bytes = weight_bytes(model)
        layout = runner.kv_layout
        self._kv_token_bytes = layout.total_bytes // (layout.num_pages * layout.page_size)

    def decode(self, num_seqs: int, context: int, steps: int) -> Speed:
        """Steps of `num_seqs` sequences, each launched before the last is read, fed on the device."""
        sequences = Sequences(self._runner, [[1]] * num_seqs, context + steps)
        sequences.start_decoding(context)
        live = sequences.live

        def run() -> None:
            pending = self._runner.launch(sequences.batch([1] * num_seqs), live)
            for _ in range(steps - 1):
                ahead = self._runner.launch(sequences.batch([1] * num_seqs, fed=True), live)
                pending.result()
                pending = ahead
            pending.result()
            sequences.rewind(steps)

        step_s = median_s(run, self._runner.device) / steps
        layers, head = num_multiplied(self._config)
        bytes_read = self._weight_bytes + num_seqs * (context + steps // 2) * self._kv_token_bytes
        floor_s = max(bytes_read / self._machine.bytes_per_s, 2 * num_seqs * (layers + head) / self._machine.flop_per_s)
        return Speed(f"{self._name}: decode, {num_seqs} at {context}", step_s, num_seqs / step_s, floor_s)

    def prefill(self, num_tokens: int) -> Speed:
        """One prompt in one step."""
        sequences = Sequences(self._runner, [[1] * num_tokens], num_tokens)

        def run() -> None:
            self._runner.launch(sequences.batch([num_tokens]), sequences.live).result()
            sequences.rewind(num_tokens)

        step_s = median_s(run, self._runner.device)
        layers, head = num_multiplied(self._config)
        floor_s = 2 * (layers * num_tokens + head) / self._machine.flop_per_s
        return Speed(f"{self._name}: prefill, {num_tokens} tokens", step_s, num_tokens / step_s, floor_s)


def speeds(run: SpeedRun, batches: list[int], context: int, steps: int, prompt: int) -> Iterator[Callable[[], Speed]]:
    """Each measurement, to be called or left out."""
    for num_seqs in batches:
        yield lambda n=num_seqs: run.decode(n, context, steps)  # type: ignore[misc]
    if prompt:
        yield lambda: run.prefill(prompt)
