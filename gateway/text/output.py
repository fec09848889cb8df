"""One choice's output: tokens in, releasable text out, each piece of text tied to the token that released it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gateway.text.detokenizer import Detokenizer
from gateway.text.stop_strings import StopMatcher
from gateway.text.tokenizer import Tokenizer
from wire.sampling import TokenLogprobs


@dataclass(slots=True)
class TokenEvent:
    """One output token and what the client may now see because of it: what one SSE event carries."""

    token_id: int
    text: str
    """Newly releasable text. Empty while a character is incomplete or a stop string may be under way; the token
    that settles it brings the held-back text along."""
    logprobs: TokenLogprobs | None
    text_offset: int
    """Where this token's own text begins, in characters of the choice's text (`text_offset` of completions)."""


class ChoiceOutput:
    """Detokenizer and stop strings of one choice.

        output = ChoiceOutput(tokenizer, prompt_ids, stops, stop_token_ids=…)
        for event in output.push(reply.tokens, reply.logprobs): …send event…
        if output.stopped_by is not None: …cancel the choice; it is over, with output.num_tokens tokens…
        when the choice ends by itself: tail = output.finish(), sent with the finish reason

    The joined texts of all events and finish() are the choice's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        *,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`stop_token_ids`: the tokens that end the sequence at the worker, i.e. the request's stop_token_ids and,
        unless ignore_eos, the model's EOS ids. They count as tokens and show no text, special or not. Stop strings
        are looked for only in the text after the first `min_tokens` tokens."""
        self.stopped_by: str | None = None
        """The stop string that ended the choice."""
        self.num_tokens = 0
        """Output tokens taken, the one that completed a stop string or ended the sequence included."""
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stops, include_stop=include_stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._num_chars = 0  # of the text before any stop string is cut: held-back text counts

    def push(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None) -> list[TokenEvent]:
        """One event per token, in order; `logprobs`, if given, is one per token. After the token that completes a
        stop string the rest is dropped, now and in later calls."""
        events: list[TokenEvent] = []
        for index, token_id in enumerate(tokens):
            if self.stopped_by is not None:
                break
            self.num_tokens += 1
            text_offset = self._num_chars
            text = "" if token_id in self._stop_token_ids else self._detokenizer.push_one(token_id)
            self._num_chars += len(text)
            if self.num_tokens > self._min_tokens:
                text, self.stopped_by = self._matcher.push(text)
            events.append(TokenEvent(token_id, text, logprobs[index] if logprobs else None, text_offset))
        return events

    def finish(self) -> str:
        """Text still held back because it began like a stop string; "" after a stop. Call once, at the end."""
        if self.stopped_by is not None:
            return ""
        return self._matcher.finish()
