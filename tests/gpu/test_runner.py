"""The CUDA runner on the CPU, graphs recorded as a GPU records them: logits and tokens are those of the eager path."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpu_worker.attention.flash_attn_backend import FlashAttention
from gpu_worker.attention.torch_backend import TorchAttention
from gpu_worker.cuda.buckets import Bucket
from gpu_worker.cuda.copy_out import HostCopy
from gpu_worker.cuda.decode_graphs import CaptureBudget, DecodeGraphs, DecodeInputs
from gpu_worker.cuda.runner import CudaModelRunner
from gpu_worker.kv_cache import KVCache, KVLayout
from gpu_worker.kv_format import Float8KV, KVFormat, PlainKV
from gpu_worker.llama import CausalLM
from gpu_worker.model_config import load_decoder_config
from gpu_worker.model_port import PipelinedRunner
from gpu_worker.step_batch import StepBatch
from gpu_worker.weight_dtype import WeightDtype
from gpu_worker.weights import load_weights
from tests.gpu.recorded_graph import CpuGraphRecorder
from tests.gpu.test_buckets import decodes
from tests.model.conftest import Reference
from tests.model.paged import PagedSequences
from tests.model.test_families import assert_close, one_token_each, random_mix, token_lists
from tests.worker.fake_runner import CARD
from tests.worker.plans import chunk, grant, greedy, plan
from tests.worker.test_executor import running, tokens_of
from wire.plan import StepReport
from wire.sampling import SamplingParams

CPU = torch.device("cpu")
BUDGET = CaptureBudget(time_s=1e9, memory_bytes=1 << 40)
SEVERAL = 3


def make_runner(
    directory: Path,
    recorder: CpuGraphRecorder | None,
    *,
    kv_format: KVFormat | None = None,
    flash: bool = False,
    num_pages: int = 40,
    max_model_len: int = 200,
) -> CudaModelRunner:
    config = load_decoder_config(directory)
    with torch.device("meta"):
        model = CausalLM(config)
    load_weights(model, directory, WeightDtype(torch.float32, torch.float32, None), CPU)
    kv_format = kv_format or PlainKV(torch.float32)
    page_size = 256 if flash else 16
    layout = KVLayout.sized(config, page_size=page_size, kv_format=kv_format, num_pages=num_pages + 1, memory_bytes=0)
    card = replace(CARD, vocab_size=320, max_model_len=max_model_len)
    attention = FlashAttention() if flash else TorchAttention(kv_format)
    runner = CudaModelRunner(card, config, model, attention, KVCache(layout, CPU), HostCopy())
    if recorder is not None:
        runner.capture(recorder, BUDGET)
    return runner


@pytest.mark.parametrize("family", ["llama_gqa_tied", "qwen2_window", "qwen3"])
def test_replayed_logits_are_the_models(
    family: str, checkpoint: Callable[[str], Path], reference: Callable[[str], Reference]
) -> None:
    rng = random.Random(family)
    recorder = CpuGraphRecorder()
    runner = make_runner(checkpoint(family), recorder)
    prompts = token_lists(rng)
    for choose in (one_token_each, random_mix(rng)):
        for actual, prompt in zip(PagedSequences(runner, prompts, rng).run(choose), prompts, strict=True):
            assert_close(actual, reference(family)(prompt))
    assert sum(graph.num_replays for graph in recorder.graphs) >= max(len(prompt) for prompt in prompts)
    assert sum(graph.num_replays > 0 for graph in recorder.graphs) >= SEVERAL  # sizes and widths


def test_replayed_logits_are_the_models_through_flash_attns_decode_call(
    checkpoint: Callable[[str], Path], reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(1)
    monkeypatch.setitem(sys.modules, "flash_attn", _module_of_graphable_attention())
    recorder = CpuGraphRecorder()
    runner = make_runner(checkpoint("mistral_window"), recorder, flash=True, num_pages=8)
    prompts = [[rng.randrange(320) for _ in range(length)] for length in (5, 30)]
    for actual, prompt in zip(PagedSequences(runner, prompts, rng).run(one_token_each), prompts, strict=True):
        assert_close(actual, reference("mistral_window")(prompt))
    assert sum(graph.num_replays for graph in recorder.graphs) == 30


def test_padding_touches_the_spare_page_alone(checkpoint: Callable[[str], Path]) -> None:
    runner = make_runner(checkpoint("llama_gqa_tied"), None)
    keys = runner._kv_cache.keys
    keys.fill_(7.0)
    runner.capture(CpuGraphRecorder(), BUDGET)
    assert bool((keys[:, : runner.num_pages] == 7.0).all())  # recording ran, on the spare page
    assert not bool((keys[:, runner.num_pages] == 7.0).all())
    before = keys.clone()
    runner.forward(decodes(5, 33, 2))  # three rows in a graph of four
    changed = (keys != before).flatten(2).any(-1).any(0).nonzero()[:, 0].tolist()
    assert changed == [0, 12, 20, runner.num_pages]


def test_a_replay_sees_only_its_own_step(checkpoint: Callable[[str], Path]) -> None:
    """A small step after a large one, and the large one again: nothing is left over in the shared inputs."""
    eager = make_runner(checkpoint("llama_gqa_tied"), None)
    graphed = make_runner(checkpoint("llama_gqa_tied"), CpuGraphRecorder())
    for lengths in ((16, 40, 7, 90, 3), (20,), (17, 41, 8, 91, 4), (2, 1)):
        batch = decodes(*lengths)
        batch.block_tables = [[page % 40 for page in table] for table in batch.block_tables]
        batch.slot_mapping = [slot % 640 for slot in batch.slot_mapping]
        # Not bitwise: a padded batch's matrix products may be cut otherwise.
        torch.testing.assert_close(graphed.forward(batch), eager.forward(batch), rtol=1e-5, atol=1e-5)


def test_steps_without_a_graph_run_eagerly(checkpoint: Callable[[str], Path]) -> None:
    recorder = CpuGraphRecorder()
    runner = make_runner(checkpoint("llama_gqa_tied"), recorder, max_model_len=64)
    assert runner.graphs is not None
    assert runner.graphs.captured[0] == Bucket(40, 4)
    runner.forward(decodes(65))  # wider than the widest table
    prefill = StepBatch([1, 2], [0, 1], [0, 1], [2], [2], [[0]], [1])
    runner.forward(prefill)
    assert sum(graph.num_replays for graph in recorder.graphs) == 0


@pytest.mark.parametrize(("time_s", "memory_bytes", "expected"), [(2.5, 100, 3), (100.0, 2, 2), (0.0, 100, 0)])
def test_capture_stops_when_its_budget_is_spent(time_s: float, memory_bytes: int, expected: int) -> None:
    graphs = DecodeGraphs(CpuGraphRecorder(), device=CPU, spare_page=9, page_size=16)
    wanted = [Bucket(4, 4), Bucket(4, 2), Bucket(2, 4), Bucket(2, 2), Bucket(1, 1)]
    clock = iter([0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def forward(inputs: DecodeInputs) -> torch.Tensor:
        return inputs.token_ids.float()[:, None] * 2

    graphs.capture(wanted, forward, CaptureBudget(time_s, memory_bytes), lambda: next(clock))
    assert graphs.captured == wanted[:expected]
    logits = graphs.run(decodes(3), lambda token_ids: None)
    assert logits is None if expected == 0 else logits is not None and logits.tolist() == [[200.0]]


def test_recording_refuses_what_a_gpu_would() -> None:
    host_reads = CpuGraphRecorder()
    with pytest.raises(AssertionError, match="makes the host wait"):
        host_reads.record(lambda: torch.zeros(3)[: int(torch.tensor([2]).sum())])


async def run_plans(runner: CudaModelRunner) -> list[StepReport]:
    drawn = SamplingParams(60, temperature=0.8, top_k=40, top_p=0.9, seed=3, ignore_eos=True, logprobs=2)
    plans = [
        plan(
            1,
            chunks=[
                chunk(1, 0, 30, tokens=range(1, 31), pages=grant([3, 1, 7, 5], 64), sampling=greedy(40)),
                chunk(2, 0, 5, tokens=range(50, 55), pages=grant([2, 4, 6], 48), sampling=drawn),
            ],
            max_steps=12,
        ),
        plan(2, chunks=[chunk(3, 0, 9, tokens=range(9), pages=grant([8, 9], 32))], max_steps=12),
    ]
    async with running(runner) as (_, client):
        return [report for one in plans for report in await client.run(one)]


@pytest.mark.parametrize("float8_kv", [False, True])
async def test_served_tokens_are_the_eager_runners(float8_kv: bool, checkpoint: Callable[[str], Path]) -> None:
    kv_format: KVFormat = Float8KV(torch.float32) if float8_kv else PlainKV(torch.float32)
    recorder = CpuGraphRecorder()
    graphed = make_runner(checkpoint("llama_gqa_tied"), recorder, kv_format=kv_format)
    eager = make_runner(checkpoint("llama_gqa_tied"), None, kv_format=kv_format)
    assert isinstance(graphed, PipelinedRunner)
    actual, expected = await run_plans(graphed), await run_plans(eager)
    for sequence in (1, 2, 3):
        assert tokens_of(actual, sequence) == tokens_of(expected, sequence)
    assert len(tokens_of(actual, 1)) == 12
    logprobs = [p.logprobs for report in actual for p in report.progress if p.seq_id == 2 and p.logprobs]
    assert all(len(one.top_ids) == 2 for [one] in logprobs)
    assert sum(graph.num_replays for graph in recorder.graphs) == 11 + 11


def _module_of_graphable_attention() -> types.ModuleType:
    """flash_attn with a decode call in torch operators alone, as a graph needs it."""

    def with_kvcache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: object) -> torch.Tensor:
        lens, table = arguments["cache_seqlens"], arguments["block_table"]
        left = arguments["window_size"][0]  # type: ignore[index]
        assert isinstance(lens, torch.Tensor)
        assert isinstance(table, torch.Tensor)
        window = None if left < 0 else left + 1
        step = TorchAttention().decode_step(lens, table, page_size=256, windows={window}, dtype=q.dtype)
        return step.attend(q[:, 0], k, v, window=window)[:, None]

    module = types.ModuleType("flash_attn")
    module.flash_attn_with_kvcache = with_kvcache  # type: ignore[attr-defined]
    return module
