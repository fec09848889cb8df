"""Drawing a step's tokens, by torch and by the kernel, in turns: `python -m bench.sampling --threads 2`.

Rows of logits as a trained model has them: most of the vocabulary far below a few dozen. Medians in ms; both sides draw
the same tokens, or it says so.
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

import torch

from bench.micro import turns
from gpu_worker.kernels.build import library_path
from gpu_worker.kernels.drawing import draw_scratch
from gpu_worker.kernels.library import Kernels
from gpu_worker.sampler import DrawnRow, draw_each
from gpu_worker.sequences import LiveSequence
from wire.config import ModelConfig, load
from wire.ids import RequestId, SeqId, UnitHash
from wire.model_path import cache_root
from wire.sampling import SamplingParams

PARAMETERS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 50},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 0.1, "top_k": 50},
    {"temperature": 100.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.1},
    {"temperature": 0.0, "presence_penalty": 0.5, "frequency_penalty": 0.1},
)
LIKELY = 40
TOKENS = 500
"""Of each sequence, half of them output: for penalties."""


def rows_of(count: int, vocab_size: int, parameters: dict[str, Any]) -> list[DrawnRow]:
    logits = torch.randn(count, vocab_size) * 2.0
    for row in logits:
        row[torch.randperm(vocab_size)[:LIKELY]] += torch.linspace(0.0, 15.0, LIKELY)
    uniforms: list[float] = torch.rand(count, dtype=torch.float64).tolist()
    tokens = torch.randint(0, vocab_size, (count, TOKENS)).tolist()
    params = SamplingParams(TOKENS, **parameters)
    return [
        DrawnRow(row, LiveSequence(SeqId(i), 0, RequestId("r"), ids, TOKENS // 2, params, UnitHash(b"")), (), u)
        for i, (row, ids, u) in enumerate(zip(logits, tokens, uniforms, strict=True))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=(1, 8, 32))
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(1)
    kernels = Kernels(library_path(cache_root(load(ModelConfig, os.environ))))
    scratch = draw_scratch(asked.vocab_size)
    print(f"{kernels.instruction_set}, {asked.threads} threads, rows of {asked.vocab_size}")
    print(f"{'parameters':>54} {'rows':>5} {'torch ms':>9} {'ours ms':>8} {'ratio':>6}")
    with torch.inference_mode():
        for parameters in PARAMETERS:
            for count in asked.rows:
                rows = rows_of(count, asked.vocab_size, parameters)
                if kernels.draw(rows, scratch) != draw_each(rows):
                    raise SystemExit(f"{parameters}: other tokens than torch's")
                by_torch, by_us = partial(draw_each, rows), partial(kernels.draw, rows, scratch)
                taken = turns({"torch": by_torch, "ours": by_us}, asked.rounds)
                name = ", ".join(f"{key} {value:g}" for key, value in parameters.items())
                print(
                    f"{name:>54} {count:5} {1e3 * taken['torch']:9.2f} {1e3 * taken['ours']:8.2f} "
                    f"{taken['torch'] / taken['ours']:6.1f}"
                )


if __name__ == "__main__":
    main()
