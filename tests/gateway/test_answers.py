"""What clients get: whole answers, streams, logprobs, usage, token ids."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.conftest import Stack, StackOpener
from tests.gateway.scripted_scheduler import saying

pytestmark = pytest.mark.asyncio(loop_scope="module")

MESSAGES = [{"role": "user", "content": "Say hello"}]


async def stream(stack: Stack, path: str, **body: Any) -> list[Any]:
    """The events of a stream; the last is "[DONE]"."""
    async with stack.http.post(f"{stack.url}{path}", json={"model": "smollm2", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = await response.text()
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    return [*map(json.loads, data[:-1]), data[-1] if data[-1] == "[DONE]" else json.loads(data[-1])]


async def test_a_whole_completion(stack: Stack) -> None:
    output = stack.encode("Hello, world!")
    stack.scheduler.script = saying([*output, 2], cached_tokens=1)
    status, answer = await stack.complete("Say hello:")
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [{"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop"}]
    prompt_tokens = len(stack.encode("Say hello:"))
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(output) + 1,
        "total_tokens": prompt_tokens + len(output) + 1,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_whole_chat_uses_the_models_template(stack: Stack) -> None:
    stack.scheduler.script = saying([*stack.encode("Hi!"), 2])
    status, answer = await stack.post("/v1/chat/completions", messages=MESSAGES)
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi!", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = "".join(stack.tokenizer.token_text(t) for t in (await stack.scheduler.arrived.get()).prompt)
    assert prompt.endswith("<|im_start|>user\nSay hello<|im_end|>\n<|im_start|>assistant\n")


async def test_a_streamed_completion_has_an_event_per_token(stack: Stack) -> None:
    output = stack.encode("One two three four")
    stack.scheduler.script = saying(output)
    *chunks, done = await stream(stack, "/v1/completions", prompt="Count:", max_tokens=len(output))
    assert done == "[DONE]"
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts[:-1] == [stack.tokenizer.token_text(token) for token in output]
    assert texts[-1] == ""
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * len(output) + ["stop"]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


async def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(stack: Stack) -> None:
    stack.scheduler.script = saying([*stack.encode("Hi there"), 2])
    *chunks, done = await stream(stack, "/v1/chat/completions", messages=MESSAGES, stream_options={})
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hi there"
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_in_a_last_chunk_without_choices(stack: Stack) -> None:
    stack.scheduler.script = saying([*stack.encode("Hi"), 2], cached_tokens=3)
    for path, prompt in (("/v1/completions", {"prompt": "Hey"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        *chunks, last, done = await stream(stack, path, **prompt, stream_options={"include_usage": True})
        assert done == "[DONE]"
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 2
        assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_max_tokens_ends_with_length(stack: Stack) -> None:
    stack.scheduler.script = saying(stack.encode("One two three four"))
    _, answer = await stack.complete(max_tokens=2)
    assert answer["choices"][0]["text"] == "One two"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (await stack.scheduler.arrived.get()).sampling.max_tokens == 2


async def test_several_prompts_and_choices_are_numbered_through(stack: Stack) -> None:
    async def echo(scheduler: Any, entry: Any) -> None:
        await saying(entry.prompt)(scheduler, entry)

    stack.scheduler.script = echo
    status, answer = await stack.complete(["red", "green blue"], n=2, max_tokens=8)
    assert status == 200
    assert [choice["text"] for choice in answer["choices"]] == ["red", "red", "green blue", "green blue"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == len(stack.encode("red")) + len(stack.encode("green blue"))
    status, answer = await stack.complete([stack.encode("red"), stack.encode("blue")], max_tokens=8)
    assert [choice["text"] for choice in answer["choices"]] == ["red", "blue"]
    *chunks, _ = await stream(stack, "/v1/completions", prompt=["red", "blue"], n=2, max_tokens=8)
    assert {c["choices"][0]["index"] for c in chunks if c["choices"][0]["finish_reason"]} == {0, 1, 2, 3}


async def test_completion_logprobs(stack: Stack) -> None:
    output = stack.encode("Hi you")
    stack.scheduler.script = saying(output)
    _, answer = await stack.complete(logprobs=2, max_tokens=len(output))
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hi", " you"]
    assert logprobs["token_logprobs"] == [-0.5, -0.5]
    assert logprobs["text_offset"] == [0, 2]
    assert [len(top) for top in logprobs["top_logprobs"]] == [2, 2]
    *chunks, _ = await stream(stack, "/v1/completions", prompt="x", logprobs=0, max_tokens=len(output))
    assert chunks[1]["choices"][0]["logprobs"] == {
        "tokens": [" you"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{" you": -0.5}],
        "text_offset": [2],
    }


async def test_chat_logprobs(stack: Stack) -> None:
    output = stack.encode("Hi")
    stack.scheduler.script = saying(output)
    options: dict[str, Any] = {"messages": MESSAGES, "logprobs": True, "max_tokens": len(output)}
    _, answer = await stack.post("/v1/chat/completions", **options, top_logprobs=2)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["logprob"], token["bytes"]) == ("Hi", -0.5, [72, 105])
    assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -1.5]
    *chunks, _ = await stream(stack, "/v1/chat/completions", **options)
    assert chunks[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_token_ids_on_request(stack: Stack) -> None:
    output = [*stack.encode("Hi there"), 2]
    stack.scheduler.script = saying(output)
    _, answer = await stack.complete([5, 6, 7], return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == output
    assert answer["choices"][0]["prompt_token_ids"] == [5, 6, 7]
    _, answer = await stack.post("/v1/chat/completions", messages=MESSAGES, return_token_ids=True)
    assert answer["choices"][0]["token_ids"] == output
    for path, prompt in (("/v1/completions", {"prompt": [5, 6, 7]}), ("/v1/chat/completions", {"messages": MESSAGES})):
        first, *chunks, _ = await stream(stack, path, **prompt, return_token_ids=True)
        assert (first.get("prompt_token_ids") or first["choices"][0]["prompt_token_ids"])[-1] is not None
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == output


async def test_echo_repeats_the_prompt(stack: Stack) -> None:
    stack.scheduler.script = saying(stack.encode(" world"))
    _, answer = await stack.complete("Hello", echo=True, max_tokens=8)
    assert answer["choices"][0]["text"] == "Hello world"
    _, answer = await stack.complete(stack.encode("Hello"), echo=True, max_tokens=8)
    assert answer["choices"][0]["text"] == "Hello world"
    *chunks, _ = await stream(stack, "/v1/completions", prompt="Hello", echo=True, max_tokens=8)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello world"


async def test_a_character_split_over_tokens_never_shows_in_halves(stack: Stack) -> None:
    text = "日本語 🦜!"
    stack.scheduler.script = saying(stack.encode(text))
    *chunks, _ = await stream(stack, "/v1/completions", prompt="x", max_tokens=64)
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)


async def test_sampling_reaches_the_mesh_as_asked(stack: Stack) -> None:
    stack.scheduler.script = saying([2])
    settings = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "min_tokens": 1,
        "ignore_eos": True,
    }
    status, _ = await stack.complete(**settings, seed=-1, stop_token_ids=[7], logit_bias={"5": -100}, max_tokens=3)
    assert status == 200
    sampling = (await stack.scheduler.arrived.get()).sampling
    assert {name: getattr(sampling, name) for name in settings} == settings
    assert sampling.seed == 2**64 - 1
    assert sampling.stop_token_ids == (7,)
    assert sampling.logit_bias == ((5, -100.0),)


async def test_omitted_settings_have_openais_defaults_and_a_seed_of_their_own(stack: Stack) -> None:
    stack.scheduler.script = saying([2])
    for _ in range(2):
        assert (await stack.complete([1, 2, 3]))[0] == 200
    first, second = [(await stack.scheduler.arrived.get()).sampling for _ in range(2)]
    assert (first.temperature, first.top_p, first.top_k) == (1.0, 1.0, 0)
    assert first.max_tokens == 8192 - 3
    assert first.seed != second.seed


async def test_harmless_fields_are_accepted(stack: Stack) -> None:
    stack.scheduler.script = saying([2])
    status, answer = await stack.post(
        "/v1/chat/completions",
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief"}]}, *MESSAGES],
        user="me",
        store=False,
        metadata={"a": "b"},
        service_tier="default",
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        modalities=["text"],
        stop=None,
        max_tokens=None,
    )
    assert status == 200, answer


async def test_headers_name_the_request_and_its_phases(stack: Stack) -> None:
    stack.scheduler.script = saying([2])
    body = {"model": "smollm2", "prompt": "x"}
    async with stack.http.post(f"{stack.url}/v1/completions", json=body) as response:
        assert response.headers["x-request-id"] == (await response.json())["id"]
        phases = "queue;dur=1.0, prefill;dur=2.0, transfer;dur=4.0, decode;dur=3.0, stall;dur=0.0"
        assert response.headers["Server-Timing"] == phases
    headers = {"x-request-id": "mine-1"}
    async with stack.http.post(
        f"{stack.url}/v1/completions", json={**body, "stream": True}, headers=headers
    ) as response:
        assert response.headers["x-request-id"] == "mine-1"
        await response.read()


async def test_models_are_listed(stack: Stack) -> None:
    async with stack.http.get(f"{stack.url}/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("smollm2", "model", 8192)
    async with stack.http.get(f"{stack.url}/v1/models/smollm2") as response:
        assert (await response.json())["id"] == "smollm2"
    async with stack.http.get(f"{stack.url}/v1/models/no/such") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")


async def test_metrics_count_what_happened(new_stack: StackOpener) -> None:
    async with new_stack() as stack:
        stack.scheduler.script = saying([*stack.encode("Hi there"), 2])
        await stack.complete([1, 2, 3])
        await stack.complete("", max_tokens=0)
        async with stack.http.get(f"{stack.url}/metrics") as response:
            lines = (await response.text()).splitlines()
    assert 'phasemesh_gateway_requests_total{route="/v1/completions",status="200"} 1.0' in lines
    assert 'phasemesh_gateway_rejections_total{code="invalid_request"} 1.0' in lines
    assert 'vllm:prompt_tokens_total{model_name="smollm2"} 3.0' in lines
    assert 'vllm:generation_tokens_total{model_name="smollm2"} 3.0' in lines
    assert 'vllm:time_to_first_token_seconds_count{model_name="smollm2"} 1.0' in lines
