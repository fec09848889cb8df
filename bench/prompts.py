"""What one benchmark request asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt as token ids."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation, each message as /v1/chat/completions takes it."""

    messages: Sequence[Mapping[str, Any]]


Prompt = Text | TokenIds | Messages


@dataclass(frozen=True, slots=True)
class PromptRequest:
    prompt: Prompt
    max_tokens: int
    at_s: float | None = None
    """When to send it, in seconds after the start; None where the load decides."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: Sequence[PromptRequest]
    warm_up: Sequence[PromptRequest]
    """Sent first and not measured: the same shape from another seed, so nothing measured is cached by them."""
