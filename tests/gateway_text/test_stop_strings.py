"""StopMatcher against a naive oracle."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.stop_strings import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=30)
PIECES = st.lists(st.text(alphabet="ab", max_size=5), max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(end, stop) of the match that ends first, the longest of several."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


def must_hold(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that is the head of a stop string."""
    return max(
        (n for n in range(len(text) + 1) for stop in stops if text.endswith(stop[:n]) and n < len(stop)), default=0
    )


@settings(deadline=None)
@given(pieces=PIECES, stops=STOPS, include_stop=st.booleans())
def test_it_stops_where_the_oracle_does_and_holds_no_more_than_it_must(
    pieces: list[str], stops: list[str], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    seen = released = ""
    for piece in pieces:
        seen += piece
        text, matched = matcher.push(piece)
        released += text
        expected = first_match(seen, stops)
        if expected is not None:
            end, stop = expected
            assert matched == stop
            assert released == seen[: end if include_stop else end - len(stop)]
            return
        assert matched is None
        assert released == seen[: len(seen) - must_hold(seen, stops)]
    assert released + matcher.finish() == seen


@settings(deadline=None)
@given(text=LETTERS, stops=STOPS)
def test_the_split_into_pieces_does_not_matter(text: str, stops: list[str]) -> None:
    whole = StopMatcher(stops)
    whole_text, whole_match = whole.push(text)
    by_char = StopMatcher(stops)
    char_text = ""
    for char in text:
        piece, char_match = by_char.push(char)
        char_text += piece
        if char_match is not None:
            assert (char_text, char_match) == (whole_text, whole_match)
            return
    assert whole_match is None
    assert char_text == whole_text
    assert by_char.finish() == whole.finish()


@pytest.mark.parametrize(
    ("stops", "text", "released", "matched"),
    [
        (["world", "lo wo"], "hello world", "hel", "lo wo"),
        (["abcd", "bc"], "abcd", "a", "bc"),
        (["c", "abc"], "abc", "", "abc"),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["aab"], "aaab", "a", "aab"),
    ],
)
def test_the_match_that_ends_first_wins(stops: list[str], text: str, released: str, matched: str) -> None:
    assert StopMatcher(stops).push(text) == (released, matched)


def test_without_stops_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.push("anything") == ("anything", None)
    assert matcher.finish() == ""


def test_a_text_of_near_misses_takes_linear_time() -> None:
    matcher = StopMatcher(["a" * 5_000 + "b"])
    started_s = time.thread_time()
    for _ in range(2_000):
        matcher.push("a" * 10)
    quadratic_s = 2_000 * 10 * 5_000 * 20e-9
    assert time.thread_time() - started_s < quadratic_s / 4
