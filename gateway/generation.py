"""One HTTP request's way through the mesh: token ids in, pieces of text out, cancelled whenever it is left early."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from gateway.inbox import ChoiceNews, Inbox
from gateway.mesh import Mesh
from gateway.replies import ReplyReader
from gateway.telemetry import Telemetry
from gateway.text.output import ChoiceOutput, TokenEvent
from gateway.text.tokenizer import Tokenizer
from wire.entries import CancelEntry, RequestEntry, RequestStats
from wire.errors import Overloaded
from wire.sampling import FinishReason


@dataclass(slots=True)
class Piece:
    """What one server-sent event carries of a choice: a token's text, or its end."""

    index: int
    """Of the choice in the response."""
    text: str
    token: TokenEvent | None
    """None: text that was held back, or nothing but the end."""
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a choice's tokens become text."""

    stops: tuple[str, ...]
    include_stop: bool
    end_token_ids: frozenset[int]
    """Tokens that end a sequence at the worker; they show no text."""


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """None: a stop string ended the request before the mesh reported it."""


class Generation:
    """The choices of every prompt, numbered through: prompt p's choice c has index p * num_choices + c."""

    def __init__(
        self, entries: Sequence[RequestEntry], rules: TextRules, tokenizer: Tokenizer, inbox: Inbox, mesh: Mesh
    ) -> None:
        self._num_choices = entries[0].num_choices
        self._prompt_tokens = sum(len(entry.prompt) for entry in entries)
        self._rules = rules
        self._inbox = inbox
        self._mesh = mesh
        self._outputs = [
            ChoiceOutput(
                tokenizer,
                entry.prompt,
                rules.stops,
                rules.include_stop,
                stop_token_ids=rules.end_token_ids,
                min_tokens=entry.sampling.min_tokens,
            )
            for entry in entries
            for _ in range(entry.num_choices)
        ]
        self._end_tokens: dict[int, TokenEvent] = {}  # index → the token that ended it, until its end is confirmed

    @property
    def done(self) -> bool:
        return self._inbox.done

    @property
    def usage(self) -> Usage:
        stats = self.stats
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(output.num_tokens for output in self._outputs),
            cached_tokens=None if None in stats else sum(s.cached_tokens for s in stats if s is not None),
        )

    @property
    def stats(self) -> list[RequestStats | None]:
        """Per prompt."""
        return self._inbox.stats

    async def take(self, telemetry: Telemetry) -> list[Piece]:
        """All that is new; waits until there is something. Raises the MeshError that ended the request."""
        pieces: list[Piece] = []
        for news in await self._inbox.take():
            index = news.request * self._num_choices + news.choice
            telemetry.got_tokens(index, len(news.tokens))
            fresh = self._advance(index, news)
            pieces += fresh
            if fresh and (reason := fresh[-1].finish_reason) is not None:
                telemetry.finished(index, reason)
        return pieces

    def _advance(self, index: int, news: ChoiceNews) -> list[Piece]:
        output = self._outputs[index]
        pieces: list[Piece] = []
        for event in output.push(news.tokens, news.logprobs):
            if event.token_id in self._rules.end_token_ids:
                self._end_tokens[index] = event  # goes out with the finish reason
            else:
                pieces.append(Piece(index, event.text, event))
        if output.stopped_by is not None:
            if news.finish_reason is None:
                request = self._inbox.requests[news.request]
                request.stop(news.choice)
                self._mesh.cancel(CancelEntry(request.request_id, "stop", news.choice))
            pieces.append(Piece(index, "", None, FinishReason.STOP))
        elif news.finish_reason is not None:
            pieces.append(Piece(index, output.finish(), self._end_tokens.pop(index, None), news.finish_reason))
        return pieces


@asynccontextmanager
async def open_generation(
    entries: Sequence[RequestEntry],
    rules: TextRules,
    *,
    lane: str,
    predicted_drain_s: float,
    tokenizer: Tokenizer,
    mesh: Mesh,
    replies: ReplyReader,
) -> AsyncIterator[Generation]:
    """Submit requests. Whatever ends the block, none of them goes on in the mesh without a reader.

    Raises Overloaded or Unavailable when they cannot be submitted.
    """
    inbox = replies.open(entries, lane)
    admitted = True
    try:
        try:
            await mesh.submit(entries, lane, predicted_drain_s=predicted_drain_s)
        except Overloaded:
            admitted = False
            raise
        yield Generation(entries, rules, tokenizer, inbox, mesh)
    finally:
        for request in inbox.requests:
            if admitted and request.terminal is None and not request.done:
                mesh.cancel(CancelEntry(request.request_id, "disconnect"))
        replies.close(inbox)
