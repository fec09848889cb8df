"""One streamed request to an OpenAI-compatible server: what is sent, and when what came back."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, assert_never
from urllib.parse import urlsplit

import aiohttp

from bench.measure import Outcome, Result
from bench.prompts import Messages, PromptRequest, Text, TokenIds
from bench.sse import DONE, SseReader
from wire.errors import ConfigInvalid, MeshError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
REJECTIONS = frozenset({429, 503})
KEEPALIVE_S = 2.0
"""Below the idle timeout of common servers (uvicorn: 5 s), so none closes a connection just as we write to it."""
MODEL_TIMEOUT_S = 30.0
ERROR_EVENT = "error in the stream"
DETAIL_CHARS = 200


class BenchFailed(MeshError):
    """A benchmark cannot run: the server is not there or answers nothing."""

    code = "bench_failed"


class MalformedStream(MeshError):
    """An event is not what OpenAI's look like."""

    code = "malformed_stream"


@dataclass(frozen=True, slots=True)
class Target:
    """A server: its root, and the endpoint when the URL named one."""

    url: str
    path: str | None = None
    model: str = ""
    api_key: str | None = None
    ignore_eos: bool = True

    def endpoint(self, request: PromptRequest) -> str:
        return self.path or (CHAT if isinstance(request.prompt, Messages) else COMPLETIONS)

    def check(self, request: PromptRequest) -> None:
        """Raises ConfigInvalid where the endpoint cannot take the prompt."""
        if isinstance(request.prompt, TokenIds) and self.endpoint(request) == CHAT:
            raise ConfigInvalid(f"{self.url}{CHAT} takes no prompt_token_ids; name {COMPLETIONS}")

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: PromptRequest) -> dict[str, Any]:
        """Greedy, streamed, with usage."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        chat = self.endpoint(request) == CHAT
        match request.prompt:
            case Text(text):
                return body | ({"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text})
            case Messages(messages):
                return body | ({"messages": list(messages)} if chat else {"prompt": as_text(messages)})
            case TokenIds(token_ids):
                return body | {"prompt": list(token_ids)}
            case _:
                assert_never(request.prompt)


def parse_target(url: str, param: str) -> Target:
    """From http://host:port, …/v1, or either endpoint's own URL. Raises ConfigInvalid."""
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        known = False
    if not known:
        raise ConfigInvalid(f"{param}={url!r}: not an http:// or https:// URL", param=param)
    root = url.rstrip("/")
    for path in (CHAT, COMPLETIONS):
        if root.endswith(path):
            return Target(root.removesuffix(path), path)
    return Target(root.removesuffix("/v1"))


def as_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """A conversation for an endpoint without a chat template."""
    return "\n\n".join(f"{m.get('role')}: {m.get('content')}" for m in messages) + "\n\nassistant:"


class StreamClient:
    """Sends requests over one pool of connections, as many as there are requests."""

    def __init__(self, http: aiohttp.ClientSession, *, timeout_s: float) -> None:
        self._http = http
        self._timeout_s = timeout_s

    async def first_model(self, target: Target) -> str:
        """What /v1/models names first. Raises BenchFailed."""
        try:
            timeout = aiohttp.ClientTimeout(total=MODEL_TIMEOUT_S)
            async with self._http.get(f"{target.url}/v1/models", headers=target.headers(), timeout=timeout) as answer:
                return str((await answer.json(content_type=None))["data"][0]["id"])
        except aiohttp.ClientConnectorError as error:
            raise BenchFailed(f"nothing listens at {target.url}; `phasemesh up` starts a stack") from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BenchFailed(f"{target.url}: {str(error) or type(error).__name__}") from error
        except (ValueError, KeyError, IndexError, TypeError):
            raise BenchFailed(f"{target.url}/v1/models names no model; name one with --model") from None

    async def send(self, target: Target, request: PromptRequest, due_s: float | None = None) -> Outcome:
        """Run one request to its end, whatever that is. `due_s` None: it is due now."""
        body = json.dumps(target.body(request)).encode()
        sent_s = time.perf_counter()
        outcome = Outcome(sent_s if due_s is None else due_s, sent_s, sent_s, Result.ERROR, "stream cut short")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(target, target.endpoint(request), body, outcome)
        except TimeoutError:
            outcome.reason = "timeout"
        except aiohttp.ClientConnectorError:
            outcome.reason = "no connection"
        except (aiohttp.ClientError, OSError):
            outcome.reason = "disconnected"
        except MalformedStream:
            outcome.reason = "malformed stream"
        outcome.end_s = time.perf_counter()
        return outcome

    async def _post(self, target: Target, path: str, body: bytes) -> aiohttp.ClientResponse:
        """Some servers close a connection after a streamed answer unannounced, just as it is used again: once more."""
        try:
            return await self._http.post(target.url + path, data=body, headers=target.headers())
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            return await self._http.post(target.url + path, data=body, headers=target.headers())

    async def _stream(self, target: Target, path: str, body: bytes, outcome: Outcome) -> None:
        async with await self._post(target, path, body) as answer:
            if answer.status != 200:
                outcome.reason = f"HTTP {answer.status}"
                outcome.result = Result.REJECTED if answer.status in REJECTIONS else Result.ERROR
                outcome.detail = _message(await answer.read())
                return
            reader = SseReader()
            finished = False
            async for chunk in answer.content.iter_any():
                finished = _take_all(reader.feed(chunk), outcome) or finished
                if outcome.reason == ERROR_EVENT:
                    return
            finished = _take_all(reader.feed(b"\n"), outcome) or finished  # a last line may lack its end
        if finished:  # some servers send no [DONE]; a finish_reason is as good
            outcome.result, outcome.reason = Result.OK, ""


def _take_all(lines: Sequence[bytes], outcome: Outcome) -> bool:
    """Note the events of one network read; True when they end the stream. Raises MalformedStream."""
    received_s = time.perf_counter()
    finished = False
    for data in lines:
        if data == DONE:
            finished = True
        elif data:
            try:
                # Of bytes, json would guess the encoding first, which takes a quarter of its time.
                finished = _take(json.loads(data.decode()), received_s, outcome) or finished
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise MalformedStream(str(error)) from error
    return finished


def _take(event: dict[str, Any], received_s: float, outcome: Outcome) -> bool:
    """Note what one event says; True when it carries a finish_reason."""
    if event.get("error"):
        outcome.reason, outcome.detail = ERROR_EVENT, _message(event)
        return False
    if usage := event.get("usage"):
        outcome.prompt_tokens = _count(usage, "prompt_tokens")
        outcome.completion_tokens = _count(usage, "completion_tokens")
        outcome.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens")
    choices = event.get("choices")
    if not choices:
        return False
    choice = choices[0]
    if _carries_output(choice):
        outcome.token_event_times_s.append(received_s)
    return choice.get("finish_reason") is not None


def _count(counts: dict[str, Any], name: str) -> int | None:
    value = counts.get(name)
    if value is not None and not isinstance(value, int):
        raise TypeError(f"{name} is not a number of tokens")
    return value


def _carries_output(choice: dict[str, Any]) -> bool:
    """A token may have no text yet (part of a character), so an empty text counts, but not in the chunk that only
    announces the role, nor in the one that only says why it ended."""
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or (choice.get("finish_reason") is None and "text" in choice)
    said = any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))
    return bool(said) or (choice.get("finish_reason") is None and "role" not in delta and "content" in delta)


def _message(answer: bytes | dict[str, Any]) -> str:
    """The OpenAI-shaped error's message, as far as there is one; one line."""
    try:
        error = (json.loads(answer) if isinstance(answer, bytes) else answer)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""
    return " ".join(text.split())[:DETAIL_CHARS]


@asynccontextmanager
async def open_client(*, timeout_s: float) -> AsyncIterator[StreamClient]:
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)  # the load bounds what is in flight
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as http:
        yield StreamClient(http, timeout_s=timeout_s)
