"""Synthetic workloads: a seed decides everything, and each has its documented shape."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from bench.prompts import Messages, PromptRequest, Workload
from bench.workloads import AGENTS_LIVE, CHAT_LIVE, RAG_CONTEXTS, SYNTHETIC, synthetic_workload


def make(name: str, requests: int = 60, *, seed: int = 0, scale: float = 1.0) -> Workload:
    return synthetic_workload(name, requests=requests, warm_up=2, seed=seed, scale=scale)


def messages(request: PromptRequest) -> list[dict[str, Any]]:
    assert isinstance(request.prompt, Messages)
    return [dict(m) for m in request.prompt.messages]


def words(request: PromptRequest) -> int:
    return sum(len(m["content"].split()) for m in messages(request))


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_seed_gives_the_same_requests_and_another_seed_others(name: str) -> None:
    assert make(name) == make(name)
    assert make(name).requests != make(name, seed=1).requests


@pytest.mark.parametrize("name", SYNTHETIC)
def test_a_longer_run_begins_like_a_shorter_one(name: str) -> None:
    assert make(name, 60).requests[:20] == make(name, 20).requests


@pytest.mark.parametrize("name", SYNTHETIC)
def test_the_warm_up_leaves_no_measured_prompt_in_a_cache(name: str) -> None:
    workload = make(name)
    assert len(workload.warm_up) == 2
    measured = {messages(r)[0]["content"][:80] for r in workload.requests}
    assert not measured & {messages(r)[0]["content"][:80] for r in workload.warm_up}


@pytest.mark.parametrize("name", SYNTHETIC)
def test_scale_shortens_prompts_and_outputs(name: str) -> None:
    whole, tenth = make(name), make(name, scale=0.1)
    assert sum(map(words, tenth.requests)) < 0.25 * sum(map(words, whole.requests))
    assert sum(r.max_tokens for r in tenth.requests) < 0.15 * sum(r.max_tokens for r in whole.requests)
    assert all(r.max_tokens >= 1 and words(r) >= 1 for r in make(name, scale=0.0).requests)


def conversations(workload: Workload) -> Counter[str]:
    """Requests of each conversation, by its first user message."""
    return Counter(messages(r)[1]["content"] for r in workload.requests)


@pytest.mark.parametrize(("name", "longest", "live"), [("chat", 6, CHAT_LIVE), ("agent", 8, AGENTS_LIVE)])
def test_a_conversation_grows_turn_by_turn_under_one_system_prompt(name: str, longest: int, live: int) -> None:
    workload = make(name, 200)
    assert len({messages(r)[0]["content"] for r in workload.requests}) == 1
    assert messages(workload.requests[0])[0]["role"] == "system"
    assert max(conversations(workload).values()) <= longest
    assert len(conversations(make(name, live * 2))) > 1, "several at a time"
    last: dict[str, list[dict[str, Any]]] = {}
    for request in workload.requests:
        now = messages(request)
        before = last.get(now[1]["content"], now[:1])
        assert now[: len(before)] == before and len(now) > len(before), "the last turn's prompt is a prefix of this one"
        assert now[-1]["role"] == "user"
        assert all(a["role"] != b["role"] for a, b in pairwise(now))
        last[now[1]["content"]] = now


def test_rag_asks_short_questions_of_few_long_contexts() -> None:
    workload = make("rag", 200)
    contexts = Counter(messages(r)[0]["content"].partition("\n\nQuestion:")[0] for r in workload.requests)
    assert len(contexts) <= RAG_CONTEXTS
    assert all(len(context.split()) == 1501 for context in contexts)
    assert contexts.most_common(1)[0][1] > 200 / RAG_CONTEXTS, "some are more popular"


def test_reasoning_is_short_in_and_long_out() -> None:
    for request in make("reasoning").requests:
        assert 30 <= words(request) <= 120 and 512 <= request.max_tokens <= 1024


def test_an_agents_later_steps_carry_output_like_a_tools() -> None:
    outputs = [messages(r)[-1]["content"] for r in make("agent").requests if len(messages(r)) > 2]
    assert outputs and all(o.startswith("Tool output: [{") for o in outputs)
