"""What an answer looks like, told apart for the two endpoints by the implementations in completions.py and chat.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.api.options import Options
from gateway.generation import Piece, Usage
from gateway.parts import TextSide
from gateway.text.output import TokenEvent
from wire.ids import RequestId


@dataclass(frozen=True, slots=True)
class Head:
    """The fields that every object of one answer starts with."""

    response_id: RequestId
    created_unix_s: int
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


@dataclass(slots=True)
class ChoiceText:
    """One choice of a whole answer, piece by piece."""

    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenEvent] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece.text)
        if piece.token is not None:
            self.tokens.append(piece.token)
        self.finish_reason = piece.finish_reason or self.finish_reason

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def token_ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]


class Form(Protocol):
    """Renders one answer."""

    def opening(self) -> list[str]:
        """JSON of the chunks that come before the first token."""
        ...

    def chunk(self, piece: Piece) -> str:
        """JSON of one chunk."""
        ...

    def usage_chunk(self, usage: Usage) -> str:
        """JSON of the last chunk: no choices, only usage."""
        ...

    def whole(self, choices: Sequence[ChoiceText], usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        ...


class Asked(Protocol):
    """A validated request of either endpoint."""

    @property
    def options(self) -> Options: ...

    async def tokenize(self, text: TextSide, limit_tokens: int, vocab_size: int) -> list[list[int]]:
        """Each prompt's token ids, at most limit_tokens and at least one. Raises InvalidRequest."""
        ...

    def form(self, head: Head, text: TextSide, prompts: Sequence[Sequence[int]]) -> Form: ...


class ChunkWriter:
    """Chunks of a stream by template: only what differs between two tokens is encoded anew.

    `{head…,"choices":[{"index":` 0 `,` body `}]` `,"usage":null` if usage was asked for `}`
    """

    def __init__(self, head: dict[str, Any], *, include_usage: bool) -> None:
        self._head = head
        self._prefix = encode(head)[:-1] + ',"choices":[{"index":'
        self._suffix = "}]," + '"usage":null}' if include_usage else "}]}"

    def chunk(self, index: int, body: str, extra: str = "") -> str:
        """`body`: the choice's members after its index; `extra`: `,"name":value` beside `choices`."""
        if extra:
            return f"{self._prefix}{index},{body}{self._suffix[:-1]}{extra}}}"
        return f"{self._prefix}{index},{body}{self._suffix}"

    def usage_chunk(self, usage: Usage) -> str:
        return encode({**self._head, "choices": [], "usage": usage_object(usage)})


_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
encode_text: Callable[[str], str] = json.encoder.encode_basestring
"""`encode` of a string, without looking at what it is: a stream does it for each token."""


def encode(value: Any) -> str:
    """Compact JSON."""
    return _ENCODER.encode(value)


def usage_object(usage: Usage) -> dict[str, Any]:
    cached = usage.cached_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
