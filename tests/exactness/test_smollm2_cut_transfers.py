"""SmolLM2's greedy tokens are the reference's when a transfer of KV is cut off, after whichever of its layers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from gpu_worker.model_runner import load_runner
from gpu_worker.paged_runner import PagedModelRunner
from gpu_worker.transfer.transports import GRPC, SHM
from scheduler.policy.transfers import DISTRUST_S
from tests.exactness.prompts import PROMPTS
from tests.exactness.reference import committed, encode_prompt
from tests.mesh.in_process import InProcessMesh, Transfers
from wire.config import BatchingConfig, ModelConfig, load
from wire.errors import TransferFailed
from wire.model_path import cache_root
from wire.plan import Role
from wire.sampling import SamplingParams

NAME = "text-64"
OUTPUT_TOKENS = 4
NUM_LAYERS = 30
LAYERS = [
    pytest.param((0, 1, 14, NUM_LAYERS - 2, NUM_LAYERS - 1), id="some"),
    pytest.param(range(NUM_LAYERS), id="every", marks=pytest.mark.full),
]
HOLDER_TOKENS = 500
"""Never reached: the request that holds the prefix is cancelled."""


class Cut:
    """Ends transfers after one layer."""

    def __init__(self) -> None:
        self.layer: int | None = None
        self.times = 0

    def __call__(self, layer: int) -> None:
        if layer == self.layer:
            self.times += 1
            raise TransferFailed(f"cut off after layer {layer}")


@pytest.fixture(scope="module")
def runners(smollm2_dir: Path) -> list[PagedModelRunner]:
    """Two workers' models; one mesh at a time has them."""
    return [
        load_runner(
            smollm2_dir,
            device="cpu",
            weight_dtype="auto",
            attention_backend="auto",
            page_size=16,
            num_pages=64,
            kv_memory_bytes=0,
            max_model_len=None,
            name="smollm2",
            kernels_dir=cache_root(load(ModelConfig, os.environ)),
            threads=1,
        )
        for _ in range(2)
    ]


@pytest.fixture(scope="module")
def case(smollm2_dir: Path) -> tuple[list[int], list[int]]:
    """A prompt, and the reference's first tokens."""
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    prompt = next(p for p in PROMPTS if p.name == NAME)
    return encode_prompt(prompt, tokenizer), committed()[NAME].tokens[:OUTPUT_TOKENS]


@asynccontextmanager
async def cuttable(
    runners: list[PagedModelRunner], transport: str, roles: list[Role], max_running: int | None = None
) -> AsyncIterator[tuple[InProcessMesh, Cut]]:
    cut = Cut()
    config = BatchingConfig(step_token_budget=32, itl_target_ms=inf, max_running=max_running)
    async with InProcessMesh(runners, config, roles=roles, transfers=Transfers(transport, cut)) as mesh:
        yield mesh, cut


async def at_rest(mesh: InProcessMesh) -> None:
    await mesh.until(lambda: all(w.pages.in_use + w.pages.retiring == 0 for w in mesh.engine.stats().workers))


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(num_tokens, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("transport", [SHM, GRPC])
@pytest.mark.parametrize("layers", LAYERS)
async def test_a_prefix_cut_off_after_any_layer(
    runners: list[PagedModelRunner], case: tuple[list[int], list[int]], layers: Sequence[int], transport: str
) -> None:
    """A request holds the prefix on one worker, which has room for no other: the next one pulls it to the other."""
    prompt, expected = case
    async with cuttable(runners, transport, [Role.BOTH, Role.BOTH], max_running=1) as (mesh, cut):
        for number, cut.layer in enumerate(layers, 1):
            salt = f"{cut.layer}"
            holder = mesh.begin(prompt, greedy(HOLDER_TOKENS), salt=salt)
            await mesh.until(lambda holder=holder: len(holder.outputs[0]) > 0)  # type: ignore[misc]
            answer = await mesh.ask(prompt, greedy(OUTPUT_TOKENS), salt=salt)
            assert answer.outputs == [expected], cut.layer
            assert cut.times == number, "nothing was pulled"
            await mesh.cancel(holder)
            assert holder.outputs[0][:OUTPUT_TOKENS] == expected[: len(holder.outputs[0])]
            await at_rest(mesh)
            mesh.skip(DISTRUST_S)


@pytest.mark.parametrize("transport", [SHM, GRPC])
@pytest.mark.parametrize("layers", LAYERS)
async def test_a_handoff_cut_off_after_any_layer(
    runners: list[PagedModelRunner], case: tuple[list[int], list[int]], layers: Sequence[int], transport: str
) -> None:
    prompt, expected = case
    async with cuttable(runners, transport, [Role.PREFILL, Role.DECODE]) as (mesh, cut):
        for number, cut.layer in enumerate(layers, 1):
            answer = await mesh.ask(prompt, greedy(OUTPUT_TOKENS), salt=f"{cut.layer}")
            assert answer.outputs == [expected], cut.layer
            assert cut.times == number, "nothing was handed off"
            await at_rest(mesh)
            mesh.skip(DISTRUST_S)
