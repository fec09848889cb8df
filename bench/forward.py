"""A worker's forward pass alone: `python -m bench.forward [--cases 1x1@192 8x1@192 1x128@2000]`.

A case is sequences × tokens of each @ context, the tokens included. Weights are stored, and inputs of linear layers
rounded, as each arm says (bench.perplexity has the arms); all arms take turns, and medians are printed. So it
shows a model's share of a step: sampling and what the executor does are not in it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from bench.micro import turns
from bench.perplexity import open_runners
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.step_batch import StepBatch
from wire.config import WorkerConfig, load

CASES = ("1x1@192", "4x1@192", "8x1@192", "16x1@192", "32x1@192", "1x128@128", "1x128@2000")


@dataclass(frozen=True, slots=True)
class Case:
    sequences: int
    tokens: int
    """Of each in this step: the last ones of its context."""
    context: int

    @classmethod
    def parse(cls, text: str) -> Case:
        """Raises ValueError, as argparse wants it."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)@([1-9]\d*)", text)
        if match is None or int(match[2]) > int(match[3]):
            raise ValueError(f"{text!r}: not SEQUENCESxTOKENS@CONTEXT with at most CONTEXT tokens")
        return cls(*(int(number) for number in match.groups()))

    def pages(self, page_size: int) -> int:
        """Of all sequences."""
        return self.sequences * -(-self.context // page_size)

    def batch(self, page_size: int, vocab_size: int) -> StepBatch:
        """One step; the KV before it is whatever lies in the pages. Each sequence wants its last row's logits."""
        batch = StepBatch()
        of_each = self.pages(page_size) // self.sequences
        for sequence in range(self.sequences):
            table = list(range(sequence * of_each, (sequence + 1) * of_each))
            for position in range(self.context - self.tokens, self.context):
                batch.token_ids.append((position * 7919 + sequence) % vocab_size)
                batch.positions.append(position)
                batch.slot_mapping.append(table[position // page_size] * page_size + position % page_size)
            batch.logit_rows.append(len(batch.token_ids) - 1)
            batch.query_lens.append(self.tokens)
            batch.context_lens.append(self.context)
            batch.block_tables.append(table)
        return batch


def measure(runners: dict[str, PagedModelRunner], case: Case, rounds: int) -> dict[str, float]:
    """Median milliseconds of a forward pass of each, in turn."""
    passes: dict[str, Callable[[], object]] = {
        arm: partial(runner.forward, case.batch(runner.page_size, runner.card.vocab_size))
        for arm, runner in runners.items()
    }
    return {arm: 1e3 * seconds for arm, seconds in turns(passes, rounds).items()}


def compare(config: WorkerConfig, cases: Sequence[Case], rounds: int) -> None:
    # Pages of all cases fit: bench.perplexity's runners have as many as one window wants.
    runners, obstacles = open_runners(config, max(case.sequences * (case.context + 64) for case in cases))
    for arm, obstacle in obstacles.items():
        print(f"without {arm}: {obstacle}")
    print(f"{'sequences × tokens @ context, ms':>34}", *(f"{arm:>22}" for arm in runners))
    for case in cases:
        taken = measure(runners, case, rounds)
        name = f"{case.sequences} × {case.tokens} @ {case.context}"
        print(f"{name:>34}", *(f"{taken[arm]:22.1f}" for arm in runners), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Case.parse, nargs="+", default=[Case.parse(case) for case in CASES])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with torch.inference_mode():
        compare(load(WorkerConfig, os.environ), arguments.cases, arguments.rounds)


if __name__ == "__main__":
    main()
