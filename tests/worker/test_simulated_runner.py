"""The runner without a model, alone and under the real executor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gpu_worker.sequences import LiveSequence
from gpu_worker.simulated_runner import REVISION, SimulatedRunner, TokenSource, open_simulated
from gpu_worker.step_batch import StepBatch
from gpu_worker.step_cost import StepCost
from gpu_worker.transfer.port import UnitPlace
from tests.model.checkpoints import make_checkpoint
from tests.worker.fake_runner import CARD, EOS
from tests.worker.plans import chunk, decode, grant, live, plan, release
from tests.worker.test_executor import finish_of, running, tokens_of
from wire.errors import ConfigInvalid, ModelUnsupported
from wire.ids import PageId
from wire.plan import PageCopy
from wire.sampling import FinishReason, SamplingParams

PROMPT = list(range(1, 41))
SEEDED = SamplingParams(100, seed=2**64 - 5)
COST = StepCost(fixed_us=2_000, decode_token_us=500)


class Time:
    """A clock that moves when somebody sleeps, and a little whenever it is read."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def now(self) -> float:
        self.now_s += 0.0001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


def runner_of(cost: StepCost, time: Time | None = None) -> SimulatedRunner:
    time = time or Time()
    return SimulatedRunner(CARD, cost, num_pages=64, page_size=16, now=time.now, sleep=time.sleep)


def predicted(seed: int, count: int, *, choice: int = 0, first: int = 0) -> list[int]:
    source = TokenSource(CARD.vocab_size, CARD.eos_token_ids)
    return source.tokens([seed] * count, [choice] * count, range(first, first + count))


def prefilled(runner: SimulatedRunner, sampling: SamplingParams) -> tuple[StepBatch, LiveSequence]:
    """The step of a prompt's last token, all others of it in its pages."""
    sequence = live(PROMPT, sampling=sampling)
    sequence.block_table = [PageId(page) for page in (5, 3, 8)]
    sequence.num_computed = 39
    slots = [sequence.block_table[p // 16] * 16 + p % 16 for p in range(40)]
    tables = [list(sequence.block_table)]
    runner.step(StepBatch(PROMPT[:39], list(range(39)), slots[:39], [39], [39], tables, []), [])  # type: ignore[arg-type]
    return StepBatch(PROMPT[39:], [39], slots[39:], [1], [40], tables, [0]), sequence  # type: ignore[arg-type]


def test_tokens_cover_the_vocabulary_but_never_an_end_token() -> None:
    source = TokenSource(8, [5, 0, 5, 900])
    drawn = source.tokens(range(400), [0] * 400, [3] * 400)
    assert set(drawn) == {1, 2, 3, 4, 6, 7}
    assert source.logprob == pytest.approx(math.log(1 / 6))


def test_a_step_lasts_as_long_as_predicted_its_own_work_included() -> None:
    time = Time()
    runner = runner_of(COST, time)
    batch, sequence = prefilled(runner, SEEDED)
    time.slept_s.clear()
    started_s = time.now_s
    output = runner.step(batch, [sequence])
    assert [sampled.token for sampled in output.sampled] == predicted(SEEDED.seed, 1)
    assert time.now_s - started_s == pytest.approx(0.0025, abs=0.0002)
    assert 0 < time.slept_s[0] < 0.0025
    free = Time()
    runner = runner_of(StepCost(), free)
    batch, sequence = prefilled(runner, SEEDED)
    runner.step(batch, [sequence])
    assert free.slept_s == []


def test_log_probabilities_are_those_of_an_even_draw() -> None:
    runner = runner_of(StepCost())
    batch, sequence = prefilled(runner, SamplingParams(10, logprobs=3))
    [sampled] = runner.step(batch, [sequence]).sampled
    assert sampled.logprobs is not None
    even = pytest.approx(-math.log(CARD.vocab_size - 1))
    assert sampled.logprobs.logprob == even and sampled.logprobs.top_logprobs == [even] * 3
    assert len(set(sampled.logprobs.top_ids)) == 3


@pytest.mark.parametrize("layer", [0, 1])
def test_a_page_that_is_not_the_sequences_own_gives_no_token(layer: int) -> None:
    runner = runner_of(StepCost())
    batch, sequence = prefilled(runner, SEEDED)
    assert runner.kv is not None
    other = runner.kv.read(layer, [UnitPlace(PageId(5), 0)])
    runner.kv.write(layer, [UnitPlace(PageId(3), 0)], other)
    [sampled] = runner.step(batch, [sequence]).sampled
    assert sampled.token is None


async def test_reused_and_copied_pages_hold_the_sequence_and_a_strangers_do_not() -> None:
    async with running(runner_of(StepCost())) as (_, client):
        await client.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48))]))
        shared = chunk(2, 32, 8, tokens=PROMPT, pages=grant([1, 2, 4], 48), sampling=SEEDED)
        copied = chunk(3, 24, 16, tokens=PROMPT, pages=grant([1, 5, 6], 48), sampling=SEEDED)
        copies = [PageCopy(PageId(2), PageId(5), 8)]
        reports = await client.run(plan(2, chunks=[shared, copied], copies=copies))
        assert tokens_of(reports, 2) == tokens_of(reports, 3) == predicted(SEEDED.seed, 1)
        wrong = chunk(4, 32, 8, tokens=PROMPT, pages=grant([2, 1, 7], 48), sampling=SEEDED)
        reports = await client.run(plan(3, chunks=[wrong]))
        assert (tokens_of(reports, 4), finish_of(reports, 4)) == ([], FinishReason.ERROR)


@pytest.mark.parametrize("follows_first", [True, False])
async def test_a_chunk_may_follow_what_the_same_step_computes(follows_first: bool) -> None:
    async with running(runner_of(StepCost())) as (_, client):
        await client.run(plan(1, chunks=[chunk(1, 0, 20, tokens=PROMPT, pages=grant([1, 2, 3], 48))]))
        rest = chunk(1, 20, 20)
        follows = chunk(2, 32, 8, tokens=PROMPT, pages=grant([1, 2, 4], 48), sampling=SEEDED)
        reports = await client.run(plan(2, chunks=[follows, rest] if follows_first else [rest, follows]))
        assert tokens_of(reports, 2) == predicted(SEEDED.seed, 1)
        assert finish_of(reports, 1) is None


async def test_chunks_batch_mates_and_a_new_incarnation_change_no_token() -> None:
    async with running(runner_of(COST)) as (_, client):
        chunks = [
            chunk(1, 0, 23, tokens=PROMPT, pages=grant([1, 2, 3, 4, 5], 80), sampling=SEEDED),
            chunk(2, 0, 8, tokens=PROMPT[:8], pages=grant([6, 7], 32), sampling=SEEDED, children=[(2, 3)]),
        ]
        reports = await client.run(plan(1, chunks=chunks))
        reports += await client.run(plan(2, chunks=[chunk(1, 23, 17)], decodes=[decode(2)], max_steps=12))
        output = tokens_of(reports, 1)
        assert output == predicted(SEEDED.seed, 12)
        assert tokens_of(reports, 2) == predicted(SEEDED.seed, 13, choice=3)
        again = chunk(
            1,
            0,
            45,
            tokens=PROMPT + output[:5],
            num_prompt=40,
            pages=grant([9, 10, 11, 12], 64),
            sampling=SEEDED,
            incarnation=1,
        )
        resumed = await client.run(plan(3, releases=[release(1)], chunks=[again], max_steps=4))
        assert tokens_of(resumed, 1) == predicted(SEEDED.seed, 4, first=5)


async def test_a_sequence_ends_at_its_own_stop_token_or_its_length() -> None:
    stop = predicted(SEEDED.seed, 3)[2]
    stopping = SamplingParams(100, seed=SEEDED.seed, stop_token_ids=(stop,))
    short = SamplingParams(2, seed=SEEDED.seed)
    async with running(runner_of(StepCost())) as (_, client):
        chunks = [
            chunk(1, 0, 8, tokens=PROMPT[:8], pages=grant([1, 2], 32), sampling=stopping),
            chunk(2, 0, 8, tokens=PROMPT[:8], pages=grant([3, 4], 32), sampling=short),
        ]
        reports = await client.run(plan(1, chunks=chunks, max_steps=16))
        assert (len(tokens_of(reports, 1)), finish_of(reports, 1)) == (3, FinishReason.STOP)
        assert (len(tokens_of(reports, 2)), finish_of(reports, 2)) == (2, FinishReason.LENGTH)
        assert EOS not in tokens_of(reports, 1)


def opened(directory: Path, **changes: int) -> SimulatedRunner:
    arguments: dict[str, Any] = {
        "page_size": None,
        "num_pages": None,
        "max_model_len": None,
        "kv_memory_bytes": 1 << 20,
    }
    return open_simulated(directory, COST, name="tiny", **(arguments | changes))


def test_the_card_is_the_models_and_its_weights_are_not_read(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama_gqa_tied")
    for weights in directory.glob("*.safetensors"):
        weights.unlink()
    runner = opened(directory, max_model_len=64)
    card = runner.card
    assert (card.name, card.vocab_size, card.max_model_len, card.eos_token_ids) == ("tiny", 320, 64, (2,))
    assert card.revision == REVISION
    config = json.loads((directory / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4
    assert runner.num_pages == (1 << 20) // (64 * token_bytes)
    assert (opened(directory, num_pages=7, page_size=16).num_pages, runner.page_size) == (7, 64)


@pytest.mark.parametrize(
    ("changes", "variable"),
    [
        ({"page_size": 24}, "PHASEMESH_KV_PAGE_SIZE"),
        ({"kv_memory_bytes": 100}, "PHASEMESH_KV_MEMORY_MB"),
        ({"max_model_len": 10**6}, "PHASEMESH_MAX_MODEL_LEN"),
    ],
)
def test_impossible_options_name_their_variable(tmp_path: Path, changes: dict[str, int], variable: str) -> None:
    directory = make_checkpoint(tmp_path, "llama_gqa_tied")
    with pytest.raises(ConfigInvalid, match=variable):
        opened(directory, **changes)


def test_a_model_that_cannot_be_served_cannot_be_simulated(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ModelUnsupported, match="architectures"):
        opened(tmp_path)
