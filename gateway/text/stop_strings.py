"""Stop strings over streamed text: nothing of a stop string leaks, nothing else is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in text that arrives in pieces.

        released | held | not seen yet           held: the longest suffix that is the head of a stop string

    The match is the one that ends first; of several that end together, the longest. So the result never depends on
    how the text was split. Knuth-Morris-Pratt per stop string: amortised O(len(text) × len(stops)), whatever the text.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`stops`: none of them empty. `include_stop`: the stop string itself is released too."""
        self._stops = sorted(stops, key=len, reverse=True)  # longest first: it wins a tie
        self._failures = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop: how much of its head the text so far ends with
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text to release now, the stop string that ended it or None). Not to be called after a match."""
        if not self._stops:
            return text, None
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            stop = self._advance(text[end - 1])
            if stop is not None:
                self._held = ""
                return text[: end if self._include_stop else end - len(stop)], stop
        num_released = len(text) - max(self._matched)
        self._held = text[num_released:]
        return text[:num_released], None

    def finish(self) -> str:
        """The text is over: what was held back is ordinary text after all."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Take one character into every stop's automaton; the longest stop string that it completes."""
        for index, stop in enumerate(self._stops):
            failure = self._failures[index]
            matched = self._matched[index]
            while matched and stop[matched] != char:
                matched = failure[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                return stop
            self._matched[index] = matched
        return None


def _failure_table(pattern: str) -> list[int]:
    """[i]: length of the longest proper prefix of pattern[: i + 1] that is its suffix (Knuth, Morris, Pratt 1977)."""
    table = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = table[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        table[i] = length
    return table
