"""The `messages` of a chat request: checked, and in the shape chat templates expect."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

from wire.errors import InvalidRequest

Message: TypeAlias = dict[str, Any]
"""role, content (a string, or absent beside tool_calls) and whatever else the client sent."""

ROLES = ("system", "developer", "user", "assistant", "tool")

MAX_MESSAGES = 4096
"""Also the most content parts and tool calls of one message."""


def validate_messages(messages: object) -> list[Message]:
    """Copies of the messages as templates want them: `developer` is `system`, text parts are joined by newlines, the
    arguments of a tool call are an object, null fields are absent. Raises InvalidRequest naming `messages[i].field`."""
    return [_message(message, f"messages[{i}]") for i, message in enumerate(_items(messages, "messages"))]


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise _invalid(where, f"{_brief(value)} is not an object")
    message: Message = {name: field for name, field in value.items() if field is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _invalid(f"{where}.role", f"{_brief(role)} is not one of {', '.join(ROLES)}")
    message["role"] = "system" if role == "developer" else role
    if not isinstance(message.get("name", ""), str):
        raise _invalid(f"{where}.name", f"{_brief(message['name'])} is not a string")
    if role == "assistant" and message.get("tool_calls"):
        calls = _items(message["tool_calls"], f"{where}.tool_calls")
        message["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif "content" not in message:
        raise _invalid(f"{where}.content", "is required")
    if "content" in message:
        message["content"] = _content(message["content"], f"{where}.content")
    return message


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text_part(part, f"{where}[{i}]") for i, part in enumerate(_items(content, where)))


def _text_part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise _invalid(where, f"{_brief(part)} is not an object")
    if part.get("type") != "text":
        raise _invalid(f"{where}.type", f"{_brief(part.get('type'))} is not supported; this model reads only 'text'")
    if not isinstance(part.get("text"), str):
        raise _invalid(f"{where}.text", f"{_brief(part.get('text'))} is not a string")
    return str(part["text"])


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _invalid(where, "is not an object with a function and its name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise _invalid(f"{where}.function.arguments", "is not JSON") from error
    if not isinstance(arguments, dict):
        raise _invalid(f"{where}.function.arguments", "is not a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}


def _items(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise _invalid(where, f"{_brief(value)} is not an array")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise _invalid(where, f"has {len(value)} items, not 1 to {MAX_MESSAGES}")
    return value


def _brief(value: object) -> str:
    """A client's value, fit for an error message whatever its size."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    return "null" if value is None else f"a value of type {type(value).__name__}"


def _invalid(where: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {problem}", param=where)
