"""Workloads from a file: one JSON object a line, {prompt | messages | prompt_token_ids, max_tokens, at_s?}."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeGuard

from bench.prompts import Messages, Prompt, PromptRequest, Text, TokenIds, Workload
from wire.errors import ConfigInvalid

PROMPTS = ("prompt", "messages", "prompt_token_ids")
KNOWN = {*PROMPTS, "max_tokens", "at_s"}
WARM_UP_MAX_TOKENS = 8


def file_workload(path: Path, *, requests: int | None, warm_up: int, param: str) -> Workload:
    """The first `requests` lines, or all. Raises ConfigInvalid naming the file's line; `param` is who named the file.

    Warm-up requests are short and fixed: the file's own lines would leave their prompts in the server's cache.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigInvalid(f"{param}={str(path)!r}: {reason}", param=param) from None
    found: list[PromptRequest] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_request(json.loads(line)))
        except ValueError as error:
            raise ConfigInvalid(f"{param}={str(path)!r}: line {number}: {error}", param=param) from None
    wanted = len(found) if requests is None else requests
    if not found or wanted > len(found):
        raise ConfigInvalid(f"{param}={str(path)!r}: holds {len(found)} requests, {wanted or 1} wanted", param=param)
    chosen = found[:wanted]
    if len({r.at_s is None for r in chosen}) > 1:
        raise ConfigInvalid(f"{param}={str(path)!r}: some lines have at_s and some do not", param=param)
    if chosen[0].at_s is not None:
        chosen.sort(key=lambda r: r.at_s or 0.0)
    return Workload(path.name, chosen, [PromptRequest(_warm_up(chosen[0].prompt), WARM_UP_MAX_TOKENS)] * warm_up)


def _request(line: Any) -> PromptRequest:
    """Raises ValueError saying what is wrong."""
    if not isinstance(line, dict):
        raise ValueError("not a JSON object")
    unknown = sorted(line.keys() - KNOWN)
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    given = [name for name in PROMPTS if name in line]
    if len(given) != 1:
        raise ValueError(f"needs exactly one of {', '.join(PROMPTS)}")
    max_tokens = line.get("max_tokens")
    if not _is_int(max_tokens) or max_tokens < 1:
        raise ValueError("max_tokens must be a positive integer")
    at_s = line.get("at_s")
    if at_s is not None and (not isinstance(at_s, int | float) or isinstance(at_s, bool) or not 0 <= at_s < math.inf):
        raise ValueError("at_s must be a number of seconds, not negative")
    return PromptRequest(_prompt(given[0], line[given[0]]), max_tokens, None if at_s is None else float(at_s))


def _prompt(name: str, value: Any) -> Prompt:
    match name:
        case "prompt" if isinstance(value, str) and value:
            return Text(value)
        case "messages" if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
            return Messages(tuple(value))
        case "prompt_token_ids" if isinstance(value, list) and value and all(map(_is_int, value)):
            return TokenIds(tuple(value))
    expected = {"prompt": "a string", "messages": "a list of objects", "prompt_token_ids": "a list of integers"}[name]
    raise ValueError(f"{name} must be {expected}, not empty")


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _warm_up(like: Prompt) -> Prompt:
    match like:
        case Text():
            return Text("Hello")
        case TokenIds(ids):
            return TokenIds(tuple(ids[:1]))
        case Messages():
            return Messages(({"role": "user", "content": "Hello"},))
