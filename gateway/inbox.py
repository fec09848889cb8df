"""What has arrived for one HTTP request and was not taken yet. Pure but for the wake-up; no I/O.

Per choice, output positions:

    [0, taken) with the handler | [taken, next_position) waiting in `tokens` | gap | early replies

A reply below next_position is a repeat and is trimmed; one above it waits until the gap is filled (from the
journal, or by the scheduler publishing again). What waits never exceeds the choice's max_tokens, and replies that
come while a slow client is being written to merge into one piece of news, so the inbox is bounded by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wire.entries import ChoiceReply, RequestEntry, RequestStats, TerminalReply, TokensReply
from wire.errors import MeshError, Unavailable, error_from_code
from wire.journal import Journal
from wire.sampling import FinishReason, TokenLogprobs


@dataclass(slots=True)
class ChoiceNews:
    """What one choice gained since its last news."""

    request: int
    """Index of the request in its inbox."""
    choice: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    """Not None: these are the last tokens."""


class ChoiceInbox:
    """Puts one choice's replies in order."""

    __slots__ = ("closed", "early", "end", "logprobs", "next_position", "tokens")

    def __init__(self) -> None:
        self.next_position = 0
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.early: dict[int, TokensReply] = {}  # position → reply, all beyond next_position
        self.end: ChoiceReply | None = None
        self.closed = False  # the handler has its end, or wants no more

    @property
    def ended(self) -> bool:
        """All output is here and the end is known."""
        return self.end is not None and self.next_position >= self.end.num_tokens

    @property
    def has_gap(self) -> bool:
        return not self.closed and (bool(self.early) or (self.end is not None and not self.ended))

    def add(self, reply: TokensReply) -> None:
        if self.closed or not self._append(reply):
            return
        while self.early:
            position = min(self.early)
            if position > self.next_position:
                return
            self._append(self.early.pop(position))

    def _append(self, reply: TokensReply) -> bool:
        """Take what is new of a reply; False when nothing is, or when it lies beyond a gap."""
        known = self.next_position - reply.position
        if known == 0 and reply.logprobs is None and not self.tokens:  # as it nearly always is
            self.tokens = reply.tokens
            self.next_position += len(reply.tokens)
            return bool(reply.tokens)
        if known < 0:
            held = self.early.get(reply.position)
            if held is None or len(held.tokens) < len(reply.tokens):
                self.early[reply.position] = reply
            return False
        fresh = reply.tokens[known:]
        self.tokens += fresh
        self.next_position += len(fresh)
        if reply.logprobs is not None:
            self.logprobs = (self.logprobs or []) + reply.logprobs[known:]
        return bool(fresh)

    def close(self) -> None:
        """Whatever still comes is of no interest."""
        self.closed = True
        self.tokens, self.logprobs = [], None
        self.early.clear()


class RequestInbox:
    """One mesh request: its choices and its terminal."""

    def __init__(self, entry: RequestEntry, lane: str, index: int, owner: Inbox, now_s: float) -> None:
        self.request_id = entry.request_id
        self.lane = lane
        self.index = index
        self.owner = owner
        self.choices = [ChoiceInbox() for _ in range(entry.num_choices)]
        self.terminal: TerminalReply | None = None
        self.unanswered: RequestEntry | None = entry
        """The request itself until its first reply: a Redis that lost it gets it again."""
        self.heard_s = now_s
        """When the last reply came."""
        self.absent = False
        """The mesh did not know the request when it was last looked for, and nothing came since."""
        self.gap_since_s: float | None = None
        self._wants_logprobs = entry.sampling.logprobs is not None
        self._stopped = False

    @property
    def done(self) -> bool:
        """The handler has all it wants. After a stop of its own it does not wait for the terminal."""
        return (self._stopped or self.terminal is not None) and all(choice.closed for choice in self.choices)

    @property
    def has_gap(self) -> bool:
        """Something that was published is missing: tokens, or a choice's end before the request's."""
        ended = self.terminal is not None and self.terminal.error_code is None
        return any(c.has_gap or (ended and c.end is None and not c.closed) for c in self.choices)

    def put(self, reply: TokensReply | ChoiceReply | TerminalReply, now_s: float) -> None:
        """Take one reply from the stream."""
        self.heard_s, self.absent, self.unanswered = now_s, False, None
        self._add(reply)

    def _add(self, reply: TokensReply | ChoiceReply | TerminalReply) -> None:
        """Repeats and what is out of range change nothing."""
        match reply:
            case TokensReply(choice=choice) if choice < len(self.choices):
                self.choices[choice].add(reply)
            case ChoiceReply(choice=choice) if choice < len(self.choices):
                self.choices[choice].end = self.choices[choice].end or reply
            case TerminalReply():
                self.terminal = self.terminal or reply
        self.owner.wake()

    def stop(self, choice: int) -> None:
        """The handler has found the end of a choice itself."""
        self._stopped = True
        self.choices[choice].close()
        self.owner.wake()

    def recover(self, journal: Journal) -> None:
        """Take from the journal what the reply stream did not bring."""
        for number, output in journal.outputs.items():
            if number >= len(self.choices) or self.choices[number].closed:
                continue
            if self._wants_logprobs and len(output.tokens) > self.choices[number].next_position:
                # A journal keeps no log-probabilities, and leaving some out would misalign the rest.
                self.owner.fail(Unavailable("log-probabilities of this request were lost"))
                return
            self._add(TokensReply(self.request_id, number, 0, output.tokens))
            if output.num_tokens is not None and output.finish_reason is not None:
                self._add(ChoiceReply(self.request_id, number, output.num_tokens, output.finish_reason))
        if journal.terminal is not None:
            self._add(journal.terminal)

    def error(self) -> MeshError | None:
        """Why the request ended without all its choices finished by themselves; None while it runs or when it did."""
        if self.terminal is None:
            return None
        if self.terminal.error_code is not None:
            message = self.terminal.error_message or "the request failed"
            return error_from_code(self.terminal.error_code, message, retry_after_s=self.terminal.retry_after_s)
        if any(c.end is not None and _cut_short(c.end) for c in self.choices if not c.closed):
            return Unavailable("the mesh cancelled this request")
        return None

    def take(self) -> Iterator[ChoiceNews]:
        for number, choice in enumerate(self.choices):
            if choice.closed:
                continue
            finish_reason = None
            if choice.end is not None and choice.ended and not _cut_short(choice.end):
                finish_reason = choice.end.finish_reason
            if choice.tokens or finish_reason is not None:
                news = ChoiceNews(self.index, number, choice.tokens, choice.logprobs, finish_reason)
                choice.tokens, choice.logprobs = [], None
                if finish_reason is not None:
                    choice.close()
                yield news


def _cut_short(end: ChoiceReply) -> bool:
    """The choice did not finish by itself; the terminal says why."""
    return end.finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)


class Inbox:
    """All the mesh requests of one HTTP request (one per prompt), and the wake-up of its handler."""

    def __init__(self, entries: Sequence[RequestEntry], lane: str, now_s: float) -> None:
        self.requests = [RequestInbox(entry, lane, index, self, now_s) for index, entry in enumerate(entries)]
        self._error: MeshError | None = None
        self._awake = asyncio.Event()

    @property
    def done(self) -> bool:
        return all(request.done for request in self.requests)

    @property
    def stats(self) -> list[RequestStats | None]:
        """Per request; None when its terminal was not waited for."""
        return [request.terminal.stats if request.terminal else None for request in self.requests]

    def wake(self) -> None:
        self._awake.set()

    def fail(self, error: MeshError) -> None:
        """End the handler's wait with an error, after the news it has not taken yet. The first error stays."""
        self._error = self._error or error
        self.wake()

    async def take(self) -> list[ChoiceNews]:
        """Everything new, as soon as there is anything; empty at the end. Raises what ended a request otherwise, after
        the news that came before it."""
        while True:
            await self._awake.wait()
            self._awake.clear()
            news = [item for request in self.requests for item in request.take()]
            if news:
                if self._error is not None or any(request.terminal is not None for request in self.requests):
                    self.wake()  # the next call looks at once for an error or the end
                return news
            for request in self.requests:
                if (error := request.error()) is not None:
                    raise error
            if self._error is not None:
                raise self._error
            if self.done:
                return []
