"""Runs token sequences through a model runner in any split, over shuffled pages."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_worker.model_runner import load_runner
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.step_batch import StepBatch
from wire.config import WorkerConfig, load
from wire.model_path import cache_root


def open_runner(directory: Path, **changes: Any) -> PagedModelRunner:
    """A runner as the tests want it, on the CPU, inputs of linear layers as they are.

    PHASEMESH_CPU_KERNELS says whether with our kernels.
    """
    config = load(WorkerConfig, os.environ)
    arguments: dict[str, Any] = {
        "device": "cpu",
        "weight_dtype": "auto",
        "activation_dtype": "float32",
        "attention_backend": "auto",
        "page_size": 16,
        "num_pages": 64,
        "kv_memory_bytes": 0,
        "max_model_len": None,
        "name": "tiny",
        "threads": 1,
        "kernels_dir": cache_root(config.model) if config.cpu_kernels == "auto" else None,
    }
    return load_runner(directory, **(arguments | changes))


@dataclass
class Sequence:
    tokens: list[int]
    block_table: list[int]
    num_computed: int = 0


class PagedSequences:
    """Sequences with their pages dealt from a shuffled pool. step() returns the logits of every token it ran."""

    def __init__(self, runner: PagedModelRunner, token_lists: list[list[int]], rng: random.Random) -> None:
        self.runner = runner
        pool = list(range(runner.num_pages))
        rng.shuffle(pool)
        self.sequences = [
            Sequence(tokens, [pool.pop() for _ in range(-(-len(tokens) // runner.page_size))]) for tokens in token_lists
        ]

    def batch(self, counts: dict[int, int]) -> StepBatch:
        """The next counts[i] tokens of each sequence i, logits of every row."""
        batch = StepBatch()
        page_size = self.runner.page_size
        for index, count in counts.items():
            sequence = self.sequences[index]
            end = sequence.num_computed + count
            for position in range(sequence.num_computed, end):
                batch.logit_rows.append(len(batch.token_ids))
                batch.token_ids.append(sequence.tokens[position])
                batch.positions.append(position)
                page = sequence.block_table[position // page_size]
                batch.slot_mapping.append(page * page_size + position % page_size)
            batch.query_lens.append(count)
            batch.context_lens.append(end)
            batch.block_tables.append(sequence.block_table[: -(-end // page_size)])
        return batch

    def step(self, counts: dict[int, int]) -> list[tuple[int, torch.Tensor]]:
        """Run counts[i] tokens of each sequence i; (i, logits [counts[i], vocab]) of each."""
        logits = self.runner.forward(self.batch(counts)).clone()  # valid until the next step
        for index, count in counts.items():
            self.sequences[index].num_computed += count
        parts = torch.split(logits, list(counts.values()))
        return list(zip(counts, parts, strict=True))

    def run(self, choose: Any) -> list[torch.Tensor]:
        """Step until all is computed; choose(remaining: dict[int, int]) says how many tokens of which.

        Returns logits [len(tokens), vocab] of every sequence.
        """
        parts: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while remaining := {
            i: len(s.tokens) - s.num_computed for i, s in enumerate(self.sequences) if s.num_computed < len(s.tokens)
        }:
            for index, logits in self.step(choose(remaining)):
                parts[index].append(logits)
        return [torch.cat(logits) for logits in parts]
