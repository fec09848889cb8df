"""A plain streaming client of /v1/completions that keeps token ids."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    cached_tokens: int = 0
    error: dict[str, Any] | None = None


async def events(
    session: aiohttp.ClientSession, url: str, prompt: list[int] | str, **params: Any
) -> AsyncGenerator[dict[str, Any], None]:
    """Each SSE event's JSON, in order; the stream must end in [DONE]."""
    body = {"model": "m", "prompt": prompt, "stream": True, "stream_options": {"include_usage": True}} | params
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            yield event
            if "error" in event:
                return
    raise AssertionError("the stream ended without [DONE]")


async def complete(
    session: aiohttp.ClientSession, url: str, prompt: list[int] | str, max_tokens: int, **params: Any
) -> Completion:
    """Run one greedy request (unless params say otherwise) to its end."""
    result = Completion()
    wanted = {"temperature": 0, "logprobs": 0, "return_token_ids": True, "max_tokens": max_tokens} | params
    async for event in events(session, url, prompt, **wanted):
        if "error" in event:
            result.error = event["error"]
            break
        if event.get("usage"):
            result.cached_tokens = (event["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        for choice in event["choices"]:
            result.text += choice["text"]
            result.token_ids += choice.get("token_ids") or []
            if choice.get("logprobs"):
                result.logprobs += choice["logprobs"]["token_logprobs"]
            result.finish_reason = choice["finish_reason"] or result.finish_reason
    return result
