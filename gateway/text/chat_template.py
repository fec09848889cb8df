"""A model's own chat template: messages → prompt text, rendered as transformers' apply_chat_template does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gateway.text.chat_messages import Message, validate_messages
from gateway.text.tokenizer import read_json
from wire.errors import InvalidRequest, ModelUnsupported

INLINE_MESSAGES = 64
INLINE_CHARS = 64 * 1024
"""Plain strings within both are rendered on the event loop (under 2 ms); anything else in a thread."""


class ChatTemplate:
    """A model's templates by name: "default", and maybe "tool_use" for requests with tools."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token, … are variables of the template. Raises ModelUnsupported when a
        template does not compile."""
        environment = _environment()
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ModelUnsupported(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        self._threads = asyncio.Semaphore(4)  # they share the GIL anyway; at most one waiter per live request

    async def render(
        self,
        messages: object,
        *,
        tools: object = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens in it: encode it with add_special_tokens=False.

        `messages` and `tools` are the request's, unchecked; `variables` are further ones for the template. Raises
        InvalidRequest for a malformed message, for what the template refuses, and when the model has no template.
        """
        if tools is None and _is_small(messages):
            return self._render(messages, tools, add_generation_prompt, variables or {})
        async with self._threads:
            return await asyncio.to_thread(self._render, messages, tools, add_generation_prompt, variables or {})

    def _render(
        self, messages: object, tools: object, add_generation_prompt: bool, variables: Mapping[str, Any]
    ) -> str:
        checked: list[Message] = validate_messages(messages)
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise InvalidRequest("tools: not an array of objects", param="tools")
        context = {
            **self._special_tokens,
            **variables,
            "messages": checked,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template_for(tools).render(context)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the model's chat template: {error}", param="messages") from error
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(f"the model's chat template cannot render this: {error}", param="messages") from error

    def _template_for(self, tools: object) -> jinja2.Template:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        return self._templates[name]


def load_chat_template(model_dir: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """chat_template.jinja and additional_chat_templates/*.jinja, else tokenizer_config.json's chat_template (one, or a
    list of named ones). Having none is no error here: a base model serves completions."""
    sources = {
        path.stem: path.read_text(encoding="utf-8") for path in model_dir.glob("additional_chat_templates/*.jinja")
    }
    main = model_dir / "chat_template.jinja"
    if main.is_file():
        sources["default"] = main.read_text(encoding="utf-8")
    if not sources:
        configured = read_json(model_dir / "tokenizer_config.json").get("chat_template") or []
        named = [{"name": "default", "template": configured}] if isinstance(configured, str) else configured
        sources = {entry["name"]: entry["template"] for entry in named}
    return ChatTemplate(sources, special_tokens)


def _is_small(messages: object) -> bool:
    """A few flat messages of short strings: told without walking anything large."""
    if not isinstance(messages, list) or len(messages) > INLINE_MESSAGES:
        return False
    num_chars = 0
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(field, str) for field in message.values()):
            return False
        num_chars += sum(map(len, message.values()))
    return num_chars <= INLINE_CHARS


def _environment() -> ImmutableSandboxedEnvironment:
    """The dialect that models' templates are written in, sandboxed: a template is somebody else's code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks what the assistant said, for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
