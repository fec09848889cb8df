"""The paged attention kernel against float64, and against itself in every split of the work."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from gpu_worker.attention.cpu_backend import CpuAttention
from gpu_worker.kernels.library import Kernels
from gpu_worker.step_batch import StepBatch

CPU = torch.device("cpu")


@dataclass
class Paged:
    """Sequences of random K and V in shuffled pages; slots that belong to nobody are NaN."""

    keys: list[torch.Tensor]  # of each sequence, [length, kv_heads, head_dim]
    values: list[torch.Tensor]
    pages: tuple[torch.Tensor, torch.Tensor]  # [num_pages, page_size, kv_heads, head_dim]
    tables: list[list[int]]

    @classmethod
    def random(cls, lengths: list[int], page_size: int, kv_heads: int, head_dim: int) -> Paged:
        counts = [-(-length // page_size) for length in lengths]
        order = list(range(sum(counts) + 2))
        random.Random(1).shuffle(order)
        pages = torch.full((2, len(order), page_size, kv_heads, head_dim), torch.nan)
        keys, values, tables = [], [], []
        for length, count in zip(lengths, counts, strict=True):
            table, order = order[:count], order[count:]
            both = torch.randn(2, length, kv_heads, head_dim)
            for position in range(length):
                pages[:, table[position // page_size], position % page_size] = both[:, position]
            keys.append(both[0])
            values.append(both[1])
            tables.append(table)
        return cls(keys, values, (pages[0], pages[1]), tables)

    def attend(
        self, kernels: Kernels, queries: list[torch.Tensor], contexts: list[int], members: list[int], window: int | None
    ) -> list[torch.Tensor]:
        """queries[i]: the last positions of the first contexts[i] of sequence members[i]."""
        page_size = self.pages[0].shape[1]
        batch = StepBatch(query_lens=[len(q) for q in queries], context_lens=contexts)
        batch.block_tables = [self.tables[i][: -(-c // page_size)] for i, c in zip(members, contexts, strict=True)]
        step = CpuAttention(kernels).prepare(
            batch, page_size=page_size, windows={window}, dtype=torch.float32, device=CPU
        )
        return list(torch.split(step.attend(torch.cat(queries), *self.pages, window=window), batch.query_lens))


def expected(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """Float64; queries [n, heads, head_dim] are the last n positions of keys."""
    group = queries.shape[1] // keys.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), k) * queries.shape[-1] ** -0.5
    distance = torch.arange(len(keys) - len(queries), len(keys))[:, None] - torch.arange(len(keys))
    hidden = (distance < 0) | (distance >= (window or len(keys)))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 1, 24, 130, 700])
@pytest.mark.parametrize("page_size", [16, 48, 64, 256])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (9, 3, 64), (40, 1, 32), (2, 2, 256)])
def test_attention_equals_float64(
    kernels: Kernels, heads: int, kv_heads: int, head_dim: int, page_size: int, window: int | None
) -> None:
    torch.manual_seed(page_size)
    lengths, query_lens = [1, 15, 17, 128, 129, 600, 1100], [1, 15, 1, 33, 129, 1, 70]
    paged = Paged.random(lengths, page_size, kv_heads, head_dim)
    queries = [torch.randn(n, heads, head_dim) for n in query_lens]
    results = paged.attend(kernels, queries, lengths, list(range(len(lengths))), window)
    for i, result in enumerate(results):
        wanted = expected(queries[i], paged.keys[i], paged.values[i], window)
        torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("group", [1, 2])
def test_rows_of_one_tile_on_both_sides_of_a_block(kernels: Kernels, group: int, window: int | None) -> None:
    """Those before it see nothing of the block that those behind it see."""
    torch.manual_seed(0)
    lengths = [129, 150, 190, 257, 513]
    paged = Paged.random(lengths, 16, 2, 16)
    for num_queries in (20, 60, 64, 100):
        queries = [torch.randn(num_queries, 2 * group, 16) for _ in lengths]
        results = paged.attend(kernels, queries, lengths, list(range(len(lengths))), window)
        for i, result in enumerate(results):
            wanted = expected(queries[i], paged.keys[i], paged.values[i], window)
            torch.testing.assert_close(result.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 24, 600])
def test_a_query_is_bitwise_the_same_alone_batched_chunked_and_paged_otherwise(
    kernels: Kernels, window: int | None
) -> None:
    torch.manual_seed(0)
    lengths, heads, kv_heads, head_dim = [1100, 300, 40], 9, 3, 64
    rng = random.Random(window)
    paged = Paged.random(lengths, 16, kv_heads, head_dim)
    queries = [torch.randn(length, heads, head_dim) for length in lengths]
    whole = paged.attend(kernels, queries, lengths, [0, 1, 2], window)
    other_pages = Paged.random(lengths, 64, kv_heads, head_dim)
    for sequence, length in enumerate(lengths):
        for position in range(length):
            slot = other_pages.tables[sequence][position // 64], position % 64
            for pages, tokens in zip(other_pages.pages, (paged.keys, paged.values), strict=True):
                pages[slot] = tokens[sequence][position]
    for cache in (paged, other_pages):
        for _ in range(30):
            members = rng.sample(range(3), rng.randint(1, 3))
            ends = [rng.randint(1, lengths[i]) for i in members]
            starts = [max(0, end - rng.choice([1, 2, 15, 40, 257])) for end in ends]
            parts = [queries[i][start:end] for i, start, end in zip(members, starts, ends, strict=True)]
            for i, start, end, result in zip(
                members, starts, ends, cache.attend(kernels, parts, ends, members, window), strict=True
            ):
                assert torch.equal(result, whole[i][start:end])


def test_scores_far_apart(kernels: Kernels) -> None:
    """Weights from 1 to what no float32 holds, maxima that rise by hundreds from block to block."""
    torch.manual_seed(0)
    paged = Paged.random([1100], 64, 3, 64)
    queries = torch.randn(200, 9, 64) * torch.logspace(0, 2, 200)[:, None, None]
    (result,) = paged.attend(kernels, [queries], [1100], [0], None)
    wanted = expected(queries, paged.keys[0], paged.values[0], None)
    torch.testing.assert_close(result.double(), wanted, rtol=1e-3, atol=1e-4)


def test_a_key_that_is_not_a_number_shows_in_the_rows_that_see_it_and_in_no_other(kernels: Kernels) -> None:
    torch.manual_seed(0)
    paged = Paged.random([300], 16, 3, 64)
    queries = torch.randn(300, 9, 64)
    (before,) = paged.attend(kernels, [queries], [300], [0], None)
    paged.pages[0][paged.tables[0][200 // 16], 200 % 16] = torch.nan
    (after,) = paged.attend(kernels, [queries], [300], [0], None)
    assert torch.equal(after[:200], before[:200]) and after[200:].isnan().all()


def test_a_step_without_tokens(kernels: Kernels) -> None:
    step = CpuAttention(kernels).prepare(StepBatch(), page_size=16, windows={None}, dtype=torch.float32, device=CPU)
    pages = torch.zeros(2, 16, 1, 16)
    assert step.attend(torch.empty(0, 2, 16), pages, pages, window=None).shape == (0, 2, 16)
