"""The arguments flash-attn gets. A plain reading of its documentation, standing in for it, must give our logits."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.attention.choose import choose, page_size_for
from gpu_worker.attention.flash_attn_backend import (
    FlashAttention,
    FlashDecodeStep,
    FlashVarlenStep,
    decode_metadata,
    varlen_metadata,
    window_size,
)
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.step_batch import StepBatch
from gpu_worker.torch_runner import TorchModelRunner
from tests.model.conftest import Reference
from tests.model.paged import PagedSequences, open_runner
from tests.model.test_families import assert_close, one_token_each, random_mix, token_lists
from wire.errors import ConfigInvalid

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def one_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: tuple[int, int], scale: float
) -> torch.Tensor:
    """q [queries, heads, dim], k and v [context, kv_heads, dim]: causal, bottom-right, by the documented window."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    center = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    seen = key <= center
    if window[0] >= 0:
        seen &= key >= center - window[0]
    if window[1] >= 0:
        seen &= key <= center + window[1]
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def check_layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_table: torch.Tensor) -> None:
    """What csrc/flash_attn/flash_api.cpp refuses, of both calls."""
    assert k.shape[1] % 256 == 0
    assert q.shape[-1] % 8 == 0
    assert q.shape[-1] <= 256
    assert q.shape[-2] % k.shape[-2] == 0
    assert block_table.dtype == torch.int32
    assert {x.stride(-1) for x in (q, k, v, block_table)} == {1}


def documented_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
) -> torch.Tensor:
    assert causal
    check_layout(q, k, v, block_table)
    assert {cu_seqlens_q.dtype, cu_seqlens_k.dtype} == {torch.int32}
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == cu_seqlens_k.diff().max()
    outputs = []
    for i, context in enumerate(cu_seqlens_k.diff().tolist()):
        keys, values = (pages[block_table[i].long()].flatten(0, 1)[:context] for pages in (k, v))
        queries = q[cu_seqlens_q[i] : cu_seqlens_q[i + 1]]
        outputs.append(one_sequence(queries, keys, values, window_size, softmax_scale))
    return torch.cat(outputs)


def documented_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
) -> torch.Tensor:
    assert causal
    assert q.shape[1] == 1
    check_layout(q, k_cache, v_cache, block_table)
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    num_seqs = len(q)
    return documented_varlen(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32),
        cu_seqlens_k=torch.cat((torch.zeros(1), cache_seqlens.cumsum(0))).int(),
        max_seqlen_q=1,
        max_seqlen_k=int(cache_seqlens.max()),
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        block_table=block_table,
    )[:, None]


@pytest.fixture
def documented_flash_attn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts the stand-in where the library would be; returns the calls made."""
    calls: list[str] = []

    def varlen(*args: torch.Tensor, **arguments: object) -> torch.Tensor:
        calls.append("varlen")
        return documented_varlen(*args, **arguments)  # type: ignore[arg-type]

    def with_kvcache(*args: torch.Tensor, **arguments: object) -> torch.Tensor:
        calls.append("with_kvcache")
        return documented_with_kvcache(*args, **arguments)  # type: ignore[arg-type]

    module = types.ModuleType("flash_attn")
    module.flash_attn_varlen_func = varlen  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls


@pytest.mark.parametrize("family", ["llama_gqa_tied", "qwen2_window", "mistral_window"])
def test_arguments_mean_what_the_model_means(
    family: str,
    checkpoint: Callable[[str], Path],
    reference: Callable[[str], Reference],
    documented_flash_attn: list[str],
) -> None:
    rng = random.Random(family)
    runner = open_runner(checkpoint(family), page_size=256, num_pages=12, kernels_dir=None)
    assert isinstance(runner, TorchModelRunner)
    runner._attention = FlashAttention()
    prompts = [*token_lists(rng), [rng.randrange(320) for _ in range(300)]]
    for choose_counts in (random_mix(rng), one_token_each):
        actual = PagedSequences(runner, prompts, rng).run(choose_counts)
        for logits, prompt in zip(actual, prompts, strict=True):
            assert_close(logits, reference(family)(prompt))
    assert set(documented_flash_attn) == {"varlen", "with_kvcache"}


def test_metadata_of_a_mixed_step() -> None:
    batch = StepBatch(query_lens=[3, 1, 256], context_lens=[3, 600, 512], block_tables=[[7], [1, 2, 3], [9, 8]])
    metadata = varlen_metadata(batch, CPU)
    assert metadata.cu_seqlens_q.tolist() == [0, 3, 4, 260]
    assert metadata.cu_seqlens_k.tolist() == [0, 3, 603, 1115]
    assert (metadata.max_seqlen_q, metadata.max_seqlen_k) == (256, 600)
    assert metadata.block_table.tolist() == [[7, 0, 0], [1, 2, 3], [9, 8, 0]]
    assert {t.dtype for t in (metadata.cu_seqlens_q, metadata.cu_seqlens_k, metadata.block_table)} == {torch.int32}


def test_metadata_of_a_step_of_decodes() -> None:
    metadata = decode_metadata(StepBatch(query_lens=[1, 1], context_lens=[5, 300], block_tables=[[4], [1, 2]]), CPU)
    assert metadata.cache_seqlens.tolist() == [5, 300]
    assert metadata.block_table.tolist() == [[4, 0], [1, 2]]
    assert {metadata.cache_seqlens.dtype, metadata.block_table.dtype} == {torch.int32}


def test_only_a_step_of_decodes_takes_the_decode_call(documented_flash_attn: list[str]) -> None:
    decodes = StepBatch(query_lens=[1, 1], context_lens=[1, 9], block_tables=[[0], [1]])
    mixed = StepBatch(query_lens=[1, 2], context_lens=[1, 9], block_tables=[[0], [1]])
    for batch, kind in ((decodes, FlashDecodeStep), (mixed, FlashVarlenStep)):
        step = FlashAttention().prepare(batch, page_size=256, windows={None}, dtype=torch.bfloat16, device=CPU)
        assert isinstance(step, kind)


def test_a_window_counts_its_own_position() -> None:
    assert window_size(None) == (-1, -1)
    assert window_size(1) == (0, 0)
    assert window_size(24) == (23, 0)


def test_auto_takes_flash_attn_only_where_it_can_run(documented_flash_attn: list[str]) -> None:
    assert isinstance(choose("auto", CUDA, torch.bfloat16, head_dim=64), FlashAttention)
    assert isinstance(choose("auto", CUDA, torch.float32, head_dim=64), TorchAttention)
    assert isinstance(choose("auto", CPU, torch.bfloat16, head_dim=64), TorchAttention)
    assert isinstance(choose("torch", CUDA, torch.bfloat16, head_dim=64), TorchAttention)
    with pytest.raises(ConfigInvalid, match="float32"):
        choose("flash_attn", CUDA, torch.float32, head_dim=64)
    with pytest.raises(ConfigInvalid, match="CUDA"):
        choose("flash_attn", CPU, torch.bfloat16, head_dim=64)
    for head_dim in (60, 264):
        assert isinstance(choose("auto", CUDA, torch.bfloat16, head_dim=head_dim), TorchAttention)
        with pytest.raises(ConfigInvalid, match=f"multiple of 8, at most 256, not {head_dim}"):
            choose("flash_attn", CUDA, torch.bfloat16, head_dim=head_dim)
    assert isinstance(choose("auto", CUDA, torch.bfloat16, head_dim=64, capability=(8, 0)), FlashAttention)
    with pytest.raises(ConfigInvalid, match=r"8\.0 \(Ampere\) or above, not 7\.5"):
        choose("flash_attn", CUDA, torch.bfloat16, head_dim=64, capability=(7, 5))


def test_without_the_library_auto_is_torch_and_flash_attn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert isinstance(choose("auto", CUDA, torch.bfloat16, head_dim=64), TorchAttention)
    with pytest.raises(ConfigInvalid, match="cannot be imported"):
        choose("flash_attn", CUDA, torch.bfloat16, head_dim=64)


def test_pages_are_multiples_of_256(documented_flash_attn: list[str]) -> None:
    assert page_size_for(FlashAttention(), None) == 256
    assert page_size_for(FlashAttention(), 512) == 512
    with pytest.raises(ConfigInvalid, match="PHASEMESH_KV_PAGE_SIZE=64"):
        page_size_for(FlashAttention(), 64)
