"""CPU kernels against torch and the machine, as ratios in one run: `python -m bench.micro [MODEL_DIR] --threads 2`.

Everything that is compared takes turns, so that a busy machine slows all alike; medians are printed. Linears are
those of a whole forward pass of the model (its head included, for every row up to 32, else for one). With --activations
weight their inputs are rounded to the weights' type in a further column.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from gpu_worker.attention.cpu_backend import CpuAttention
from gpu_worker.attention.port import StepAttention
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.kernels.build import library_path
from gpu_worker.kernels.library import DOTS_DEPTH, PANEL_DTYPES, Kernels, PackedLinear, pack, pack_dots, pack_scales
from gpu_worker.model_config import DecoderConfig, load_decoder_config
from gpu_worker.step_batch import StepBatch
from wire.config import ModelConfig, load
from wire.model_path import cache_root, model_path

ROWS = (1, 2, 4, 6, 8, 12, 16, 32, 64, 128, 256)
CONTEXTS = (128, 2000, 4000)
PAGE_SIZE = 64
MAX_KV_BYTES = 400 << 20


def turns(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, run in turn; the first round warms up."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


class Linears:
    """Every matrix of a model, random, in torch's layout and in ours, or in that of dot products too."""

    def __init__(self, config: DecoderConfig, kernels: Kernels, stored: torch.dtype, *, dots: bool) -> None:
        self._kernels = kernels
        hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
        qkv = heads + 2 * config.num_kv_heads * config.head_dim
        shapes = [(qkv, hidden), (hidden, heads), (inner, hidden), (inner, hidden), (hidden, inner)]
        self._layers = [[torch.randn(shape) for shape in shapes] for _ in range(config.num_layers)]
        self._head = torch.randn(config.vocab_size, hidden)
        layouts = (False, True) if dots else (False,)
        self._packed = [[[_packed(w, stored, is_dots) for w in layer] for layer in self._layers] for is_dots in layouts]
        self._packed_heads = [_packed(self._head, stored, is_dots) for is_dots in layouts]
        self.layer_elements = sum(w.numel() for layer in self._layers for w in layer)
        self.head_elements = self._head.numel()

    def by_torch(self, x: torch.Tensor, logit_rows: int) -> None:
        for qkv, output, gate, up, down in self._layers:
            x = x + linear(linear(x, qkv)[:, : output.shape[1]], output) * 0.0
            x = x + linear(silu(linear(x, gate)) * linear(x, up), down) * 0.0
        linear(x[:logit_rows], self._head)

    def by_us(self, x: torch.Tensor, logit_rows: int, *, dots: bool = False) -> None:
        layers, head = self._packed[dots], self._packed_heads[dots]
        first, *_ = layers
        qkv_out = torch.empty(len(x), first[0].columns)
        inner, x, result = torch.empty(len(x), first[2].columns), x.clone(), torch.empty_like(x)
        for qkv, output, gate, up, down in layers:
            self._kernels.linear(x, qkv, qkv_out)
            self._kernels.linear(qkv_out[:, : output.depth], output, result)
            self._kernels.swiglu(x, gate, up, inner)
            self._kernels.linear(inner, down, result)
        self._kernels.linear(x[:logit_rows], head, torch.empty(logit_rows, head.columns))


def _packed(weight: torch.Tensor, stored: torch.dtype, dots: bool) -> PackedLinear:
    scales = pack_scales(weight) if stored is torch.int8 else None
    return PackedLinear((pack_dots if dots else pack)(weight, stored), None, len(weight), scales)


def read_bandwidth(buffer: torch.Tensor) -> Callable[[], object]:
    """Reads it all, as fast as torch's threads can."""
    return lambda: buffer.sum()


def compare_linears(
    config: DecoderConfig, kernels: Kernels, stored: torch.dtype, all_rows: list[int], rounds: int, *, dots: bool
) -> None:
    linears = Linears(config, kernels, stored, dots=dots)
    print(f"weights stored as {str(stored).removeprefix('torch.')}; torch's are float32")
    print(
        f"{'linears, rows':>14} {'torch ms':>9} {'ours ms':>9} {'ratio':>6} {'GFLOP/s':>8} {'÷ reading once':>14}"
        + (f" {'rounded ms':>10} {'ratio':>6} {'GFLOP/s':>8} {'÷ reading once':>14}" if dots else "")
    )
    buffer = torch.ones((linears.layer_elements + linears.head_elements) * stored.itemsize // 4)
    for rows in all_rows:
        logit_rows = rows if rows <= 32 else 1
        x = torch.randn(rows, config.hidden_size)
        contestants: dict[str, Callable[[], object]] = {
            "torch": partial(linears.by_torch, x, logit_rows),
            "ours": partial(linears.by_us, x, logit_rows),
            "read": read_bandwidth(buffer),
        }
        if dots:
            contestants["rounded"] = partial(linears.by_us, x, logit_rows, dots=True)
        taken = turns(contestants, rounds)
        work = 2 * (rows * linears.layer_elements + logit_rows * linears.head_elements)
        print(
            f"{rows:14} {1e3 * taken['torch']:9.1f} {1e3 * taken['ours']:9.1f} {taken['torch'] / taken['ours']:6.2f} "
            f"{work / taken['ours'] / 1e9:8.0f} {taken['ours'] / taken['read']:14.2f}"
            + (
                f" {1e3 * taken['rounded']:10.1f} {taken['ours'] / taken['rounded']:6.2f} "
                f"{work / taken['rounded'] / 1e9:8.0f} {taken['rounded'] / taken['read']:14.2f}"
                if dots
                else ""
            )
        )


def attention_layers(config: DecoderConfig, positions: int) -> torch.Tensor:
    """K and V of as many layers as keep them out of the caches, as in a whole forward pass: [layers, 2, pages, …]."""
    page = (PAGE_SIZE, config.num_kv_heads, config.head_dim)
    pages = positions // PAGE_SIZE
    layer_bytes = 2 * positions * config.num_kv_heads * config.head_dim * 4
    return torch.randn(max(1, min(config.num_layers, MAX_KV_BYTES // layer_bytes)), 2, pages, *page)


def compare_attention(config: DecoderConfig, kernels: Kernels, rounds: int) -> None:
    """Milliseconds a layer; GB/s are those of K and V, read once."""
    print(
        f"{'attention: sequences × queries @ context':>42} {'torch ms':>9} {'ours ms':>9} {'ratio':>6} "
        f"{'GFLOP/s':>8} {'GB/s':>6} {'÷ reading once':>14}"
    )
    for context in CONTEXTS:
        for num_seqs, queries in ((1, 1), (8, 1), (32, 1), (1, 128)):
            pages = -(-context // PAGE_SIZE)
            tables = [list(range(i * pages, (i + 1) * pages)) for i in range(num_seqs)]
            layers = attention_layers(config, num_seqs * pages * PAGE_SIZE)
            q = torch.randn(num_seqs * queries, config.num_heads, config.head_dim)
            batch = StepBatch(query_lens=[queries] * num_seqs, context_lens=[context] * num_seqs, block_tables=tables)
            contestants = {
                backend.name: all_layers(
                    backend.prepare(
                        batch, page_size=PAGE_SIZE, windows={None}, dtype=torch.float32, device=torch.device("cpu")
                    ),
                    q,
                    layers,
                )
                for backend in (TorchAttention(), CpuAttention(kernels))
            }
            taken = turns(contestants | {"read": read_bandwidth(layers)}, rounds)
            ours, seen = taken["cpu"] / len(layers), queries * context - queries * (queries - 1) // 2
            work = 4 * num_seqs * seen * config.num_heads * config.head_dim
            case = f"{num_seqs} × {queries} @ {context}"
            print(
                f"{case:>42} {1e3 * taken['torch'] / len(layers):9.2f} {1e3 * ours:9.2f} "
                f"{taken['torch'] / taken['cpu']:6.2f} {work / ours / 1e9:8.0f} {layers[0].nbytes / ours / 1e9:6.1f} "
                f"{taken['cpu'] / taken['read']:14.2f}"
            )


def all_layers(step: StepAttention, q: torch.Tensor, layers: torch.Tensor) -> Callable[[], object]:
    return lambda: [step.attend(q, *layer, window=None) for layer in layers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", nargs="?", type=Path, help="whose shapes are measured; default: PHASEMESH_MODEL's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows of the linears' input")
    parser.add_argument("--instruction-set", help="avx512, avx2 or baseline; default: the best this CPU has")
    parser.add_argument("--stored", choices=[str(t).removeprefix("torch.") for t in PANEL_DTYPES], default="float32")
    parser.add_argument(
        "--activations",
        choices=("float32", "weight"),
        default="float32",
        help="weight: inputs rounded to the stored type beside float32 ones, on a CPU with the instructions for it",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load(ModelConfig, os.environ)
    config = load_decoder_config(arguments.model_dir or model_path(model))
    kernels = Kernels(library_path(cache_root(model)), arguments.instruction_set)
    stored, dots = getattr(torch, arguments.stored), arguments.activations == "weight"
    if dots and stored not in kernels.dots:
        parser.error(f"--activations weight: {kernels.instruction_set} has no dot products of {arguments.stored} here")
    if dots and (odd := [depth for depth in config.linear_depths if depth % DOTS_DEPTH]):
        parser.error(f"--activations weight: depths must be multiples of {DOTS_DEPTH}, not {odd[0]}")
    print(f"{kernels.instruction_set}, {arguments.threads} threads, medians of {arguments.rounds} rounds taken in turn")
    with torch.inference_mode():
        compare_linears(config, kernels, stored, arguments.rows, arguments.rounds, dots=dots)
        compare_attention(config, kernels, arguments.rounds)


if __name__ == "__main__":
    main()
