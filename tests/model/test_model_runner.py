"""The runner: page copies, steps without logits, sizes, and refusals of what a worker may be asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpu_worker.kv_cache import KVLayout
from gpu_worker.kv_format import PlainKV
from gpu_worker.model_config import load_decoder_config
from gpu_worker.model_port import ModelRunner
from gpu_worker.model_runner import load_runner
from gpu_worker.step_batch import StepBatch
from tests.model.conftest import Reference
from tests.model.paged import PagedSequences, open_runner
from wire.errors import ConfigInvalid
from wire.ids import PageId
from wire.plan import PageCopy

FAMILY = "llama_gqa_tied"


def tokens(count: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randrange(320) for _ in range(count)]


def test_card_says_what_is_served(checkpoint: Callable[[str], Path]) -> None:
    runner = open_runner(checkpoint(FAMILY), max_model_len=100)
    port: ModelRunner = runner
    card = port.card
    assert (card.name, card.architecture, card.vocab_size) == ("tiny", "LlamaForCausalLM", 320)
    assert (card.max_model_len, card.eos_token_ids, card.kv_dtype) == (100, (2,), "float32")
    assert len(card.revision) == 64
    assert (runner.num_pages, runner.page_size, runner.device.type) == (64, 16, "cpu")


def test_a_step_without_logits_still_writes_its_kv(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    prompt = tokens(40)
    sequences = PagedSequences(open_runner(checkpoint(FAMILY)), [prompt], random.Random(0))
    batch = sequences.batch({0: 39})
    batch.logit_rows = []
    logits = sequences.runner.forward(batch)
    assert (logits.shape, logits.dtype) == ((0, 320), torch.float32)
    sequences.sequences[0].num_computed = 39
    [(_, logits)] = sequences.step({0: 1})
    torch.testing.assert_close(logits[0], reference(FAMILY)(prompt)[-1], rtol=1e-4, atol=2e-4)


def test_logits_come_in_the_order_of_their_rows(checkpoint: Callable[[str], Path]) -> None:
    sequences = PagedSequences(open_runner(checkpoint(FAMILY)), [tokens(20), tokens(9)], random.Random(0))
    batch = sequences.batch({0: 20, 1: 9})
    every = sequences.runner.forward(batch).clone()
    batch.logit_rows = [28, 3, 19, 3]
    torch.testing.assert_close(sequences.runner.forward(batch), every[batch.logit_rows], rtol=1e-5, atol=1e-5)


def test_logits_may_be_changed_in_place(checkpoint: Callable[[str], Path]) -> None:
    sequences = PagedSequences(open_runner(checkpoint(FAMILY)), [tokens(3)], random.Random(0))
    [(_, logits)] = sequences.step({0: 3})
    logits.mul_(2.0)


def test_a_sequence_continues_on_a_copied_page(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    """A fork at token 21: one full page shared, five slots of the next copied, then a different continuation."""
    runner = open_runner(checkpoint(FAMILY))
    prompt = tokens(30)
    fork = prompt[:21] + tokens(12)
    sequences = PagedSequences(runner, [prompt, fork], random.Random(0))
    sequences.step({0: 30})
    source, target = sequences.sequences
    target.block_table[0] = source.block_table[0]
    target.num_computed = 21
    runner.copy_pages([PageCopy(PageId(source.block_table[1]), PageId(target.block_table[1]), 5)])
    [(_, logits)] = sequences.step({1: 12})
    torch.testing.assert_close(logits, reference(FAMILY)(fork)[21:], rtol=1e-4, atol=2e-4)


def test_copies_run_in_order_and_touch_only_their_slots(checkpoint: Callable[[str], Path]) -> None:
    runner = open_runner(checkpoint(FAMILY), num_pages=4)
    for tensor in (runner._kv_cache.keys, runner._kv_cache.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = runner._kv_cache.keys.clone(), runner._kv_cache.values.clone()
    runner.copy_pages([PageCopy(PageId(0), PageId(1), 7), PageCopy(PageId(1), PageId(2), 9)])
    for tensor, old in zip((runner._kv_cache.keys, runner._kv_cache.values), before, strict=True):
        expected = old.clone()
        expected[:, 1, :7] = old[:, 0, :7]
        expected[:, 2, :9] = expected[:, 1, :9]
        assert torch.equal(tensor, expected)


def test_pages_are_sized_from_memory(checkpoint: Callable[[str], Path]) -> None:
    config = load_decoder_config(checkpoint(FAMILY))
    page_bytes = 2 * 3 * 16 * 2 * 16 * 4  # K and V, layers, slots, KV heads, head_dim, float32
    plain = PlainKV(torch.float32)
    layout = KVLayout.sized(config, page_size=16, kv_format=plain, num_pages=None, memory_bytes=5 * page_bytes + 1)
    assert (layout.num_pages, layout.total_bytes) == (5, 5 * page_bytes)
    with pytest.raises(ConfigInvalid, match="PHASEMESH_KV_MEMORY_MB"):
        KVLayout.sized(config, page_size=16, kv_format=plain, num_pages=None, memory_bytes=page_bytes)


def test_default_page_size_is_the_backends(checkpoint: Callable[[str], Path]) -> None:
    assert open_runner(checkpoint(FAMILY), page_size=None).page_size == 64


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"page_size": 24}, "PHASEMESH_KV_PAGE_SIZE"),
        ({"max_model_len": 513}, "PHASEMESH_MAX_MODEL_LEN"),
        ({"device": "abacus"}, "PHASEMESH_DEVICE"),
        ({"device": "cuda:63"}, "PHASEMESH_DEVICE"),
        ({"num_pages": 2**36}, "PHASEMESH_KV_PAGES"),
        ({"attention_backend": "flash_attn"}, "PHASEMESH_ATTENTION_BACKEND"),
        ({"attention_backend": "magic"}, "PHASEMESH_ATTENTION_BACKEND"),
        ({"num_pages": 1}, "PHASEMESH_KV_PAGES"),
    ],
)
def test_impossible_options_name_their_variable(
    changes: dict[str, object], variable: str, checkpoint: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigInvalid, match=variable):
        open_runner(checkpoint(FAMILY), **changes)


def test_forward_of_one_token_from_plain_lists(checkpoint: Callable[[str], Path]) -> None:
    runner = load_runner(
        checkpoint(FAMILY),
        device="auto",
        weight_dtype="float32",
        attention_backend="torch",
        page_size=16,
        num_pages=None,
        kv_memory_bytes=1 << 20,
        max_model_len=None,
        name="tiny",
    )
    logits = runner.forward(StepBatch([1], [0], [0], [1], [1], [[0]], [0]))
    assert logits.shape == (1, 320)
