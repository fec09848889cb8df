"""Threads that lose their cores in the middle of a piece: others do it too, and nobody writes it twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gpu_worker.attention.cpu_backend import CpuAttention, CpuStepAttention
from gpu_worker.kernels.library import PANEL_DTYPES, Kernels, PackedLinear, pack, pack_dots, pack_scales
from gpu_worker.step_batch import StepBatch

ROWS = (1, 5, 16)
THREADS = 8
"""More than cores: some always wait for one, whatever they were at."""
ROUNDS = 60


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def crowded(run: Callable[[], torch.Tensor], count: int = THREADS, rounds: int = ROUNDS) -> Iterator[torch.Tensor]:
    """Results of `run` by far too many threads, beside another team."""
    over = threading.Event()

    def busy() -> None:
        x = torch.randn(400, 400)
        torch.set_num_threads(2)
        while not over.is_set():
            x @ x

    other = threading.Thread(target=busy)
    other.start()
    try:
        with threads(count):
            for _ in range(rounds):
                yield run()
    finally:
        over.set()
        other.join()


def layers(kernels: Kernels) -> list[tuple[PackedLinear, PackedLinear]]:
    """Two of every kind that this instruction set multiplies by: [520, 192]."""
    torch.manual_seed(0)
    weights = torch.randn(520, 192), torch.randn(520, 192)
    made = []
    for dtype in PANEL_DTYPES:
        scales = [pack_scales(w) if dtype is torch.int8 else None for w in weights]
        made.append([PackedLinear(pack(w, dtype), None, 520, s) for w, s in zip(weights, scales, strict=True)])
    for dtype in sorted(kernels.dots, key=str):
        scales = [pack_scales(w) if dtype is torch.int8 else None for w in weights]
        made.append([PackedLinear(pack_dots(w, dtype), None, 520, s) for w, s in zip(weights, scales, strict=True)])
    return [(first, second) for first, second in made]


@pytest.mark.parametrize("rows", ROWS)
def test_linears_of_a_crowded_team_are_bitwise_those_of_one_thread(kernels: Kernels, rows: int) -> None:
    torch.manual_seed(rows)
    x, before = torch.randn(rows, 192), torch.randn(rows, 520)
    for first, second in layers(kernels):

        def run(first: PackedLinear = first, second: PackedLinear = second) -> torch.Tensor:
            added, gated = before.clone(), torch.empty(rows, 520)
            kernels.linear(x, first, added, add=True)
            kernels.swiglu(x, first, second, gated)
            return torch.cat((added, gated))

        with threads(1):
            expected = run()
        assert all(torch.equal(result, expected) for result in crowded(run))


def test_more_threads_than_have_a_place_for_their_pieces(built: Path) -> None:
    """MOST_THREADS in src/team.h."""
    torch.manual_seed(0)
    weight, x = torch.randn(2080, 192), torch.randn(5, 192)
    kernels, layer = Kernels(built), PackedLinear(pack(weight), None, 2080)

    def run() -> torch.Tensor:
        out = torch.empty(5, 2080)
        kernels.linear(x, layer, out)
        return out

    with threads(1):
        expected = run()
    assert all(torch.equal(result, expected) for result in crowded(run, count=70, rounds=10))


@pytest.mark.parametrize("contexts", [[1, 40, 300], [700, 20, 1600]], ids=["one split", "several"])
def test_attention_of_a_crowded_team_is_bitwise_that_of_one_thread(kernels: Kernels, contexts: list[int]) -> None:
    torch.manual_seed(0)
    counts = [-(-context // 16) for context in contexts]
    tables = [list(range(sum(counts[:i]), sum(counts[: i + 1]))) for i in range(len(counts))]
    pages = torch.randn(2, sum(counts), 16, 3, 64)
    queries = torch.randn(3, 9, 64)
    batch = StepBatch(query_lens=[1, 1, 1], context_lens=contexts, block_tables=tables)
    for window in (None, 200):
        step = CpuAttention(kernels).prepare(
            batch, page_size=16, windows={window}, dtype=torch.float32, device=torch.device("cpu")
        )

        def run(step: CpuStepAttention = step, window: int | None = window) -> torch.Tensor:
            return step.attend(queries, pages[0], pages[1], window=window)

        with threads(1):
            expected = run()
        assert all(torch.equal(result, expected) for result in crowded(run))


def test_largest_of_a_crowded_team(built: Path) -> None:
    kernels = Kernels(built)
    values = torch.randn(5, 20_000)
    expected = values.max(-1)

    def run() -> torch.Tensor:
        best, columns = kernels.largest(values)
        assert columns == expected.indices.tolist()
        return torch.tensor(best)

    assert all(torch.equal(result, expected.values) for result in crowded(run))
