"""The real `openai` client, streaming and whole, errors included."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from tests.gateway.conftest import Stack
from tests.gateway.scripted_scheduler import saying

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    stack.scheduler.script = saying([*stack.encode("Hello there"), 2])
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == "Hello there"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


async def test_streamed_chat_with_usage(client: openai.AsyncOpenAI) -> None:
    text, usage = "", None
    async for chunk in await client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
    ):
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        usage = chunk.usage or usage
    assert text == "Hello there"
    assert usage is not None
    assert usage.completion_tokens == 3


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="smollm2", prompt="Hi", logprobs=1)
    assert answer.choices[0].text == "Hello there"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 5, 11]
    chunks = await client.completions.create(model="smollm2", prompt=[1, 2, 3], stream=True)
    assert "".join([chunk.choices[0].text async for chunk in chunks]) == "Hello there"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["smollm2"]
    assert (await client.models.retrieve("smollm2")).id == "smollm2"


async def test_errors_are_the_clients_own_classes(client: openai.AsyncOpenAI, stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-4", prompt="Hi")
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="smollm2", prompt="Hi", temperature=-1)
    assert bad.value.param == "temperature"

    async def fails_later(scheduler, entry):  # type: ignore[no-untyped-def]
        await scheduler.say(entry, stack.encode("Hello"))
        await scheduler.terminate(entry, "worker_lost")

    stack.scheduler.script = fails_later
    with pytest.raises(openai.APIError, match="scripted worker_lost"):
        async for _ in await client.completions.create(model="smollm2", prompt="Hi", stream=True):
            pass
    with pytest.raises(openai.InternalServerError) as away:
        await client.completions.create(model="smollm2", prompt="Hi")
    assert (away.value.status_code, away.value.code) == (503, "worker_lost")
