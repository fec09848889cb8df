"""SmolLM2 through the whole mesh (processes, Redis, gRPC) gives transformers' greedy tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.exactness.prompts import EVERYDAY, PROMPTS, REGENERATED
from tests.exactness.reference import (
    MAX_DIFFERENT_SHARE,
    Reference,
    Tally,
    check,
    check_logprobs,
    committed,
    encode_prompt,
    smollm2_model,
)
from tests.mesh.client import Completion, complete
from tests.mesh.stack import MeshStack

pytestmark = pytest.mark.timeout(1500)

Case = tuple[str, list[int], int]
"""(name, prompt token ids, output tokens)."""


class Suite:
    """The prompts of one run, and how outputs are judged."""

    def __init__(self, model_dir: Path, names: Iterable[str]) -> None:
        self.model_dir = model_dir
        self.references = committed()
        self.tally = Tally()
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        wanted = set(names)
        self.cases: list[Case] = [
            (p.name, encode_prompt(p, tokenizer), p.output_tokens) for p in PROMPTS if p.name in wanted
        ]

    def everyday_at_most(self, tokens: int) -> list[Case]:
        """Prompts up to a length that `make test` can afford; all of them in the whole matrix."""
        return [case for case in self.cases if len(case[1]) <= tokens or len(self.cases) == len(PROMPTS)]

    def pages_of_longest(self, page_size: int) -> int:
        return max(-(-(len(prompt) + output) // page_size) for _, prompt, output in self.cases)

    def judge(self, case: Case, answer: Completion) -> None:
        name, prompt, _ = case
        assert answer.error is None, (name, answer.error)
        reference: Reference = self.references[name]
        model = None if answer.token_ids == reference.tokens else smollm2_model(self.model_dir)
        check(name, prompt, answer.token_ids, reference, model, self.tally)
        check_logprobs(name, answer.token_ids, answer.logprobs, reference)


EVERYDAY_OR_ALL = [
    pytest.param(EVERYDAY, id="everyday"),
    pytest.param([p.name for p in PROMPTS], id="all", marks=pytest.mark.full),
]


@pytest.fixture(params=EVERYDAY_OR_ALL)
def suite(request: pytest.FixtureRequest, smollm2_dir: Path, report_figure: Callable[[str], None]) -> Iterator[Suite]:
    suite = Suite(smollm2_dir, request.param)
    yield suite
    report_figure(str(suite.tally))
    assert suite.tally.share <= MAX_DIFFERENT_SHARE


StartStack = Callable[..., MeshStack]


@pytest.fixture
def start(tmp_path: Path, smollm2_dir: Path) -> StartStack:
    def make(*, workers: int = 1, **env: object) -> MeshStack:
        return MeshStack(smollm2_dir, tmp_path, workers=workers, env={k: str(v) for k, v in env.items()})

    return make


async def one_by_one(suite: Suite, url: str, cases: list[Case]) -> list[Completion]:
    async with aiohttp.ClientSession() as session:
        answers = []
        for case in cases:
            answers.append(await complete(session, url, case[1], case[2]))
            suite.judge(case, answers[-1])
    return answers


async def at_once(suite: Suite, url: str, cases: list[Case], number: int = 16) -> list[Completion]:
    """`number` requests in flight together, cases repeated to fill them."""
    chosen = (cases * number)[: max(number, len(cases))]
    gate = asyncio.Semaphore(number)

    async def run(case: Case) -> Completion:
        async with gate:
            return await complete(session, url, case[1], case[2])

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1200)) as session:
        answers = await asyncio.gather(*(run(case) for case in chosen))
    for case, answer in zip(chosen, answers, strict=True):
        suite.judge(case, answer)
    return list(answers)


def test_the_committed_reference_is_what_transformers_says_today(smollm2_dir: Path) -> None:
    suite = Suite(smollm2_dir, REGENERATED)
    model = smollm2_model(smollm2_dir)
    for name, prompt, output_tokens in suite.cases:
        live, kept = model.reference(prompt, output_tokens), suite.references[name]
        assert live.prompt_digest == kept.prompt_digest
        assert live.tokens == kept.tokens or min(kept.gaps) < 1e-3
        assert live.logprobs == pytest.approx(kept.logprobs, abs=1e-3)


async def test_alone_then_from_the_cache_whole(suite: Suite, start: StartStack) -> None:
    """Budget 64, pages of 16: cold, then a full-prompt hit that recomputes one token."""
    with start(STEP_TOKEN_BUDGET=64, ITL_TARGET_MS="inf", KV_PAGE_SIZE=16) as stack:
        cold = await one_by_one(suite, stack.url, suite.cases)
        assert cold[0].cached_tokens == 0
        hits = await one_by_one(suite, stack.url, suite.cases)
        for case, hit in zip(suite.cases, hits, strict=True):
            assert hit.cached_tokens == min(len(case[1]) - 1, len(case[1]) // 16 * 16), case[0]
        stack.wait_no_page_in_use()


async def test_sixteen_at_once_in_large_steps_with_hits_inside_a_page(suite: Suite, start: StartStack) -> None:
    """Budget 2048, pages of 64: a prefix first, so that the whole prompt's hit ends inside a page; then all."""
    with start(STEP_TOKEN_BUDGET=2048, ITL_TARGET_MS="inf", KV_PAGE_SIZE=64) as stack:
        async with aiohttp.ClientSession() as session:
            inside = 0
            for case in suite.everyday_at_most(1000):
                await complete(session, stack.url, case[1][: max(1, len(case[1]) * 2 // 3)], 1)
                hit = await complete(session, stack.url, case[1], case[2])
                suite.judge(case, hit)
                inside += hit.cached_tokens % 64 != 0
        assert inside >= 3, "no hit ended inside a page"
        await at_once(suite, stack.url, suite.cases)
        stack.wait_no_page_in_use()


async def test_tiny_steps(suite: Suite, start: StartStack) -> None:
    """Budget 7, alone and together: every prompt in dozens of chunks beside decodes."""
    with start(STEP_TOKEN_BUDGET=7, ITL_TARGET_MS="inf", KV_PAGE_SIZE=16) as stack:
        cases = suite.everyday_at_most(200)
        await at_once(suite, stack.url, cases)
        await one_by_one(suite, stack.url, cases[:2])


async def test_after_forced_preemption(suite: Suite, start: StartStack) -> None:
    """A pool that holds the prompts but not their outputs: running sequences push each other out and come back."""
    cases = [case for case in suite.cases if len(case[1]) <= 200]
    with start(KV_PAGE_SIZE=16, KV_PAGES=15, KV_WATERMARK=0) as stack:
        await at_once(suite, stack.url, cases)
        assert stack.scheduler_metric("vllm:num_preemptions_total") > 0
        stack.wait_no_page_in_use()


async def test_in_a_pool_that_barely_holds_the_longest_prompt(suite: Suite, start: StartStack) -> None:
    """Everything is evicted for it, and it for everything."""
    with start(KV_PAGE_SIZE=16, KV_PAGES=suite.pages_of_longest(16), KV_WATERMARK=0) as stack:
        await at_once(suite, stack.url, suite.cases)
        stack.wait_no_page_in_use()


async def test_two_workers_one_of_them_killed(suite: Suite, start: StartStack) -> None:
    """Two workers share the load; one dies (-9) while it runs streams; they go on on the other."""
    with start(workers=2) as stack:
        await at_once(suite, stack.url, suite.cases)
        for worker in stack.workers:
            assert stack.scheduler_metric("phasemesh_scheduler_tokens_total", f'worker="{worker.name}"') > 0
        victim = stack.workers[0]
        running = asyncio.create_task(at_once(suite, stack.url, suite.everyday_at_most(500)))
        await asyncio.to_thread(victim.wait_metric, "phasemesh_worker_sequences", 2)
        victim.kill()
        await running
        assert stack.scheduler_metric("phasemesh_scheduler_displaced_sequences_total") > 0, "the victim ran nothing"
        victim.start()
        victim.wait_healthy()
        await at_once(suite, stack.url, suite.everyday_at_most(100))
        stack.wait_no_page_in_use()
