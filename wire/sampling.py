"""How a request wants its tokens drawn and when it ends. Past the gateway nobody changes these."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling of one request, already validated and with every default filled in by the gateway.

    The worker applies them in this order: logit bias → penalties → temperature → top-k → top-p → min-p
    → draw (design §6).
    """

    max_tokens: int
    """Output tokens at most, ≥ 1."""
    min_tokens: int = 0
    """EOS and stop_token_ids are masked out until this many output tokens exist."""
    temperature: float = 1.0
    """0 is argmax."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest likeliest set whose probability reaches p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p × the likeliest, in [0, 1]."""
    repetition_penalty: float = 1.0
    """Over prompt and output tokens: positive logits divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted once from a token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias) added to the logits first."""
    seed: int = 0
    """64-bit unsigned. Every request has one: the gateway draws it when the client gives none."""
    stop_token_ids: tuple[int, ...] = ()
    """Ends the sequence, beside the model's own EOS ids; the token is not part of the text."""
    ignore_eos: bool = False
    """The model's EOS ids do not end the sequence (stop_token_ids still do)."""
    logprobs: int | None = None
    """None: none wanted. k ≥ 0: the chosen token's log-probability and the k likeliest."""


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    """EOS or a stop token id (worker), or a stop string (gateway)."""
    LENGTH = "length"
    """max_tokens or the model's length."""
    CANCELLED = "cancelled"
    """The client left, or its gateway did."""
    ERROR = "error"


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities of one drawn token, natural log of the softmax of the raw logits (before sampling filters)."""

    logprob: float
    top_ids: list[int]
    """[k], likeliest first."""
    top_logprobs: list[float]
    """[k]."""
