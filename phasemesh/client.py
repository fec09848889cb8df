"""A small client of the HTTP API: standard library only, so that `phasemesh chat` starts at once."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from wire.errors import ConfigInvalid, MeshError

TIMEOUT_S = 60.0
"""Longest silence from the gateway."""


class ApiError(MeshError):
    """The gateway cannot be reached, or answered with an error."""

    code = "api_error"

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; None when there was no answer."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate."""

    max_tokens: int | None = None
    temperature: float | None = None

    def fields(self) -> dict[str, Any]:
        given = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {name: value for name, value in given.items() if value is not None}


class Client:
    """Calls one gateway. `url` is its root, http://host:port."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigInvalid(f"{url!r} is not an http:// or https:// URL", param="PHASEMESH_URL")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._prefix = urlsplit(self.url).path
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def model(self) -> str:
        """Name of the first model served. Raises ApiError."""
        with self._response("GET", "/v1/models", None) as response:
            models = json.loads(response.read())["data"]
        if not models:
            raise ApiError(f"{self.url} serves no model")
        return str(models[0]["id"])

    def chat(self, model: str, question: str, generation: Generation) -> Iterator[str]:
        """Pieces of the answer's text as they come. Raises ApiError."""
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "stream": True, **generation.fields()}
        for chunk in self._events("/v1/chat/completions", body):
            for choice in chunk["choices"]:
                yield choice["delta"].get("content") or ""

    def complete(self, model: str, prompt: str, generation: Generation) -> Iterator[str]:
        """The same for a model without a chat template. Raises ApiError."""
        body = {"model": model, "prompt": prompt, "stream": True, **generation.fields()}
        for chunk in self._events("/v1/completions", body):
            for choice in chunk["choices"]:
                yield choice["text"]

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._response("POST", path, body) as response:
            for line in response:
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise ApiError(event["error"]["message"])
                yield event
        raise ApiError(f"{self.url} ended the stream before it was done")

    @contextmanager
    def _response(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, payload, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ApiError(_message(response), status=response.status)
            yield response
        except ConnectionRefusedError as error:
            raise ApiError(f"nothing listens at {self.url}; `phasemesh up` starts a stack") from error
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise ApiError(f"{self.url}: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _message(response: http.client.HTTPResponse) -> str:
    """The OpenAI-shaped error's message, else the status line."""
    try:
        return str(json.loads(response.read(65_536))["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status} {response.reason}"
