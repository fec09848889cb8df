"""The real `openai` client against the whole mesh and the real model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from tests.mesh.stack import MeshStack

pytestmark = pytest.mark.asyncio(loop_scope="module")
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def shared_stack(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Iterator[MeshStack]:
    with MeshStack(smollm2_dir, tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest_asyncio.fixture(loop_scope="module")
async def client(shared_stack: MeshStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{shared_stack.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_a_chat_answer_in_real_words(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"


async def test_a_streamed_chat_says_the_same_token_by_token(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="m",
        messages=QUESTION,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "The capital of France is Paris."
    assert sum(bool(text) for text in texts) >= 6
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


async def test_several_choices_and_a_seed(client: openai.AsyncOpenAI) -> None:
    async def ask(seed: int) -> list[str]:
        answer = await client.completions.create(
            model="m", prompt="My favourite animal is", n=3, seed=seed, max_tokens=8, temperature=1.0
        )
        return [choice.text for choice in answer.choices]

    first = await ask(7)
    assert len(set(first)) > 1, "choices of one request draw differently"
    assert await ask(7) == first
    assert await ask(8) != first


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="m",
        messages=QUESTION,
        temperature=0,
        stop=["France is"],
    )
    assert answer.choices[0].message.content == "The capital of "
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "error", "word"),
    [
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [1] * 9000}, openai.BadRequestError, "9000"),
        ({"prompt": "x", "max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"prompt": "x", "temperature": -1}, openai.BadRequestError, "temperature"),
        ({"prompt": [99999999]}, openai.BadRequestError, "prompt"),
        ({"prompt": "x", "model": "nobody"}, openai.NotFoundError, "nobody"),
    ],
)
async def test_errors_are_openais(
    client: openai.AsyncOpenAI,
    shared_stack: MeshStack,
    fields: dict[str, object],
    error: type[openai.APIStatusError],
    word: str,
) -> None:
    with pytest.raises(error, match=word):
        await client.completions.create(**({"model": "m"} | fields))  # type: ignore[call-overload]
    shared_stack.wait_no_page_in_use()
