"""Rendering equals transformers'; what cannot be rendered is refused by name."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from gateway.text.chat_messages import MAX_MESSAGES, validate_messages
from gateway.text.chat_template import INLINE_CHARS, ChatTemplate, load_chat_template
from gateway.text.tokenizer import Tokenizer
from tests.gateway_text import templates
from wire.errors import InvalidRequest, ModelUnsupported

SOURCES = {"llama3": templates.LLAMA3, "mistral": templates.MISTRAL, "qwen": templates.QWEN}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

USER = {"role": "user", "content": "What is 2 + 2? <b>&é\n"}
SYSTEM = {"role": "system", "content": "  Be brief.  "}
ASSISTANT = {"role": "assistant", "content": " Four. "}
CONVERSATIONS = [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER]]

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "x": "<é>"}}}]
TOOL_TURN = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é"}}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
]


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
async def test_smollm2_prompt_equals_transformers(
    messages: list[dict[str, Any]], add_generation_prompt: bool, smollm2_dir: Path, smollm2: Tokenizer, reference: Any
) -> None:
    template = load_chat_template(smollm2_dir, smollm2.special_tokens)
    text = await template.render(messages, add_generation_prompt=add_generation_prompt)
    ids = smollm2.encode(text, add_special_tokens=False)
    options = {"add_generation_prompt": add_generation_prompt}
    assert text == reference.apply_chat_template(messages, tokenize=False, **options)
    assert ids == reference.apply_chat_template(messages, return_dict=False, **options)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("add_generation_prompt", [False, True])
async def test_rendering_equals_transformers(
    name: str, messages: list[dict[str, Any]], add_generation_prompt: bool, reference: Any
) -> None:
    template = ChatTemplate({"default": SOURCES[name]}, reference.special_tokens_map)
    assert await template.render(
        messages, add_generation_prompt=add_generation_prompt
    ) == reference.apply_chat_template(
        messages, chat_template=SOURCES[name], tokenize=False, add_generation_prompt=add_generation_prompt
    )


@pytest.mark.parametrize("tools", [None, TOOLS])
async def test_tools_and_tool_calls_equal_transformers(tools: list[dict[str, Any]] | None, reference: Any) -> None:
    template = ChatTemplate({"default": templates.QWEN}, reference.special_tokens_map)
    rendered = await template.render(TOOL_TURN, tools=tools, variables={"enable_thinking": False})
    assert rendered == reference.apply_chat_template(
        TOOL_TURN,
        tools=tools,
        chat_template=templates.QWEN,
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )


async def test_tool_call_arguments_may_be_json_text() -> None:
    template = ChatTemplate({"default": templates.QWEN}, SPECIAL)
    as_text = json.loads(json.dumps(TOOL_TURN))
    function = as_text[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    assert await template.render(as_text) == await template.render(TOOL_TURN)


async def test_what_the_template_refuses_is_an_invalid_request() -> None:
    template = ChatTemplate({"default": templates.MISTRAL}, SPECIAL)
    with pytest.raises(InvalidRequest, match="roles must alternate user and assistant"):
        await template.render([USER, USER])


async def test_a_field_the_template_misses_is_an_invalid_request(smollm2_dir: Path) -> None:
    template = load_chat_template(smollm2_dir, {})
    with pytest.raises(InvalidRequest, match="content"):
        await template.render(TOOL_TURN)


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ range(10**9) }}", "{{ messages[0].missing.field }}"]
)
async def test_a_failing_template_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template"):
        await ChatTemplate({"default": source}, {}).render([USER])


async def test_a_template_cannot_reach_python() -> None:
    template = ChatTemplate({"default": "{{ messages.__class__.__mro__[1].__subclasses__() }}"}, {})
    with pytest.raises(InvalidRequest):
        await template.render([USER])
    template = ChatTemplate({"default": "{{ messages.append(1) }}"}, {})
    with pytest.raises(InvalidRequest):
        await template.render([USER])


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    template = load_chat_template(tmp_path, {})
    with pytest.raises(InvalidRequest, match="no chat template"):
        await template.render([USER])


def test_a_template_that_does_not_compile_is_refused_at_start() -> None:
    with pytest.raises(ModelUnsupported, match="line 2"):
        ChatTemplate({"default": "\n{% if %}"}, {})


async def test_named_templates_of_the_tokenizer_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(tmp_path, {})
    assert await template.render([USER]) == "plain"
    assert await template.render([USER], tools=TOOLS) == "with tools"
    assert await template.render([USER], tools=[]) == "plain"


async def test_template_files_go_before_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    assert await load_chat_template(tmp_path, {}).render([USER]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    template = load_chat_template(tmp_path, {})
    assert await template.render([USER]) == "file"
    assert await template.render([USER], tools=TOOLS) == "tool file"


def test_developer_is_system_and_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    developer = {"role": "developer", "content": "x"}
    messages = [developer, {"role": "user", "content": parts, "name": None}]
    assert validate_messages(messages) == [{"role": "system", "content": "x"}, {"role": "user", "content": "one\ntwo"}]
    assert developer["role"] == "developer"


def _call(function: object) -> list[dict[str, object]]:
    return [{"role": "assistant", "tool_calls": [{"function": function}]}]


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        (None, "messages", "null is not an array"),
        ("hi", "messages", "not an array"),
        ([], "messages", "0 items"),
        ([USER] * (MAX_MESSAGES + 1), "messages", f"{MAX_MESSAGES}"),
        ([USER, 3], "messages[1]", "not an object"),
        ([{"content": "x"}], "messages[0].role", "null"),
        ([USER, {"role": "wizard", "content": "x"}], "messages[1].role", "'wizard' is not one of system"),
        ([{"role": "w" * 10**6, "content": "x"}], "messages[0].role", "…"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "type list"),
        ([{"role": "user"}], "messages[0].content", "required"),
        ([{"role": "assistant", "content": None}], "messages[0].content", "required"),
        ([{"role": "user", "content": 3}], "messages[0].content", "type int"),
        ([{"role": "user", "content": []}], "messages[0].content", "0 items"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "not an object"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "not a string"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name", "not a string"),
        (_call(None), "messages[0].tool_calls[0]", "function"),
        (_call({"name": "f", "arguments": "{"}), "messages[0].tool_calls[0].function.arguments", "not JSON"),
        (_call({"name": "f", "arguments": "[1]"}), "messages[0].tool_calls[0].function.arguments", "not a JSON object"),
        (_call({"name": "f", "arguments": "[" * 10**5}), "messages[0].tool_calls[0].function.arguments", "not JSON"),
    ],
)
def test_a_malformed_message_is_refused_by_name(messages: object, param: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        validate_messages(messages)
    assert caught.value.param == param
    assert len(caught.value.message) < 200


async def test_malformed_tools_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await ChatTemplate({"default": "x"}, {}).render([USER], tools=["add"])
    assert caught.value.param == "tools"


async def test_only_large_conversations_leave_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered_in: list[int] = []
    template = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {})
    monkeypatch.setitem(
        template._templates["default"].globals, "strftime_now", lambda _: rendered_in.append(threading.get_ident())
    )
    await template.render([USER])
    await template.render([{"role": "user", "content": "x" * (INLINE_CHARS + 1)}])
    await template.render([USER], tools=TOOLS)
    here = threading.get_ident()
    assert [thread == here for thread in rendered_in] == [True, False, False]


async def test_a_huge_conversation_leaves_the_loop_responsive() -> None:
    template = ChatTemplate({"default": templates.QWEN}, SPECIAL)
    part = {"type": "text", "text": "some words"}
    messages = [{"role": "user", "content": [part] * 4000}] * 500  # 80 MB of JSON
    started_s = time.perf_counter()
    rendering = asyncio.create_task(template.render(messages))
    longest_turn_s = 0.0
    while not rendering.done():
        turn_started_s = time.perf_counter()
        await asyncio.sleep(0)
        longest_turn_s = max(longest_turn_s, time.perf_counter() - turn_started_s)
    assert len(rendering.result()) > 20_000_000
    assert longest_turn_s < (time.perf_counter() - started_s) / 4
