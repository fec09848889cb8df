"""Every malformed request gets a clear 4xx that names its field, and leaves nothing in the mesh."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.conftest import Stack
from tests.gateway.scripted_scheduler import saying

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "Hi"}]
HUGE = 10**400

# field → values that are refused in both endpoints, with the field named
BAD_COMMON: dict[str, list[Any]] = {
    "max_tokens": [0, -1, HUGE, 1.0, "5", True, [1]],
    "max_completion_tokens": [0, -1, False],
    "temperature": [-0.1, -1, "1", True, HUGE, [1]],
    "top_p": [0, -0.5, 1.5, "1", True],
    "top_k": [-2, 1.5, "1", True, HUGE],
    "min_p": [-0.1, 1.1, "0"],
    "seed": [1.5, "1", True, HUGE],
    "stop": ["", [""], ["a", 1], 5, {}, ["x"] * 17, "x" * 1025, [["a"]]],
    "stop_token_ids": [[-1], ["a"], [True], 5, [49152], list(range(129))],
    "min_tokens": [-1, "1", True],
    "ignore_eos": [1, "true"],
    "presence_penalty": [-2.1, 2.1, "0", True],
    "frequency_penalty": [-2.1, 2.1, "0", True],
    "repetition_penalty": [0, -1, "1", HUGE],
    "logit_bias": [[], {"a": 1}, {"-1": 1}, {"49152": 1}, {"5": 101}, {"5": "1"}, {"5": True}, {"5": 1, "05": 2}],
    "n": [0, 17, 1.0, "1", True],
    "best_of": [2],
    "stream": ["true", 1],
    "stream_options": [{"include_usage": True}],  # without stream
    "return_token_ids": [1],
    "include_stop_str_in_output": ["yes"],
    "add_special_tokens": [1],
    "priority": [1.5, "1", True, 2**31],
    "service_tier": ["fastest", 1],
    "cache_salt": [5, "x" * 513],
    "model": [5, "", None, "x" * 513],
    "tools": [[{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["required"],
    "response_format": [{"type": "json_object"}],
    "functions": [[{"name": "f"}]],
    "suffix": ["end"],
    "modalities": [["text", "audio"]],
    "audio": [{"voice": "x"}],
    "guided_json": [{}],
    "reasoning_effort": ["high"],
    "no_such_field": [1],
}
BAD_COMPLETION: dict[str, list[Any]] = {
    "prompt": [
        None,
        "",
        [],
        [""],
        [[]],
        ["a", ""],
        [[1], []],
        5,
        {},
        True,
        [1, "a"],
        ["a", 1],
        ["a", [1]],
        [[1], "a"],
        [1.5],
        [True],
        [None],
        [[1, None]],
        [49152],
        [-1],
        [HUGE],
        [[1], [49152]],
        ["x"] * 129,
    ],
    "logprobs": [-1, 21, True, "1"],
    "echo": ["yes"],
}
BAD_CHAT: dict[str, list[Any]] = {
    "messages": [None, [], "Hi", {}],
    "messages[0]": [["Hi"]],
    "messages[0].role": [[{"content": "Hi"}], [{"role": "robot", "content": "Hi"}], [{"role": 5, "content": "Hi"}]],
    "messages[0].content": [[{"role": "user"}], [{"role": "user", "content": 5}], [{"role": "user", "content": []}]],
    "messages[0].content[0].type": [[{"role": "user", "content": [{"type": "image_url"}]}]],
    "logprobs": [1, "true"],
    "top_logprobs": [5, -1, 21, True],
    "echo": [True],
    "chat_template_kwargs": [[1]],
}


def cases(bad: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in bad.items() for value in values]


async def refused(stack: Stack, path: str, body: dict[str, Any], param: str) -> dict[str, Any]:
    """Assert a well-formed 4xx naming the field, and an untouched mesh."""
    async with stack.http.post(f"{stack.url}{path}", json=body) as response:
        answer = await response.json()
        assert 400 <= response.status < 500, answer
    error: dict[str, Any] = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"] or "").split(".")[0] == param.split(".")[0], error
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) < 400
    assert await stack.scheduler.live() == 0
    assert await stack.scheduler.backlog() == 0
    return error


@pytest.mark.parametrize(("field", "value"), cases(BAD_COMMON))
async def test_bad_common_field(stack: Stack, field: str, value: Any) -> None:
    body = {"model": "smollm2", "prompt": "Hi", field: value}
    await refused(stack, "/v1/completions", {k: v for k, v in body.items() if v is not None}, field)
    body = {"model": "smollm2", "messages": USER, field: value}
    await refused(stack, "/v1/chat/completions", {k: v for k, v in body.items() if v is not None}, field)


@pytest.mark.parametrize(("field", "value"), cases(BAD_COMPLETION))
async def test_bad_completion_field(stack: Stack, field: str, value: Any) -> None:
    await refused(stack, "/v1/completions", {"model": "smollm2", "prompt": "Hi", field: value}, field)


@pytest.mark.parametrize(("field", "value"), cases(BAD_CHAT))
async def test_bad_chat_field(stack: Stack, field: str, value: Any) -> None:
    name = "messages" if field.startswith("messages") else field
    body = {"model": "smollm2", "messages": USER, name: value}
    error = await refused(stack, "/v1/chat/completions", body, field)
    assert error["param"] == field


async def test_stream_options_are_strict(stack: Stack) -> None:
    body = {"model": "smollm2", "prompt": "Hi", "stream": True}
    bad: list[Any] = [5, [], {"include_usage": 1}, {"no_such": True}]
    for options in bad:
        await refused(stack, "/v1/completions", {**body, "stream_options": options}, "stream_options")


async def test_unknown_model_is_not_found(stack: Stack) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "Hi"}), ("/v1/chat/completions", {"messages": USER})):
        error = await refused(stack, path, {"model": "gpt-4", **prompt}, "model")
        assert error["code"] == "model_not_found"


async def test_a_prompt_longer_than_the_context_is_refused_with_both_lengths(stack: Stack) -> None:
    for prompt in ([5] * 9000, "word " * 9000):
        error = await refused(stack, "/v1/completions", {"model": "smollm2", "prompt": prompt}, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert "900" in error["message"]
        assert "8191" in error["message"]
    # So long in bytes that nobody tokenizes it.
    huge = {"model": "smollm2", "prompt": "a b " * 250_000}
    assert "at least" in (await refused(stack, "/v1/completions", huge, "prompt"))["message"]
    messages = [{"role": "user", "content": "word " * 9000}]
    await refused(stack, "/v1/chat/completions", {"model": "smollm2", "messages": messages}, "messages")


async def test_output_that_does_not_fit_beside_the_prompt_is_refused_with_both_numbers(stack: Stack) -> None:
    body = {"model": "smollm2", "prompt": [5] * 192, "max_tokens": 8001}
    error = await refused(stack, "/v1/completions", body, "max_tokens")
    assert error["code"] == "context_length_exceeded"
    assert "192" in error["message"]
    assert "8001" in error["message"]
    stack.scheduler.script = saying([2])
    assert (await stack.complete([5] * 192, max_tokens=8000))[0] == 200
    assert (await stack.complete([5] * 8191))[0] == 200
    assert [(await stack.scheduler.arrived.get()).sampling.max_tokens for _ in range(2)] == [8000, 1]


async def test_more_min_tokens_than_output_is_refused(stack: Stack) -> None:
    body = {"model": "smollm2", "prompt": [5], "max_tokens": 3, "min_tokens": 4}
    await refused(stack, "/v1/completions", body, "min_tokens")


async def test_contradicting_limits_are_refused(stack: Stack) -> None:
    body = {"model": "smollm2", "prompt": [5], "max_tokens": 3, "max_completion_tokens": 4}
    await refused(stack, "/v1/completions", body, "max_completion_tokens")


async def test_echo_with_logprobs_is_refused(stack: Stack) -> None:
    await refused(stack, "/v1/completions", {"model": "smollm2", "prompt": [5], "echo": True, "logprobs": 1}, "echo")


async def test_unknown_routes_and_methods_are_openai_shaped(stack: Stack) -> None:
    async with stack.http.post(f"{stack.url}/v1/embeddings", json={}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with stack.http.get(f"{stack.url}/v1/completions") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["Allow"] == "POST"
