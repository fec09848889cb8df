"""Events come out the same however the network cut them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.sse import DONE, SseReader

STREAM = b': hello\n\ndata: {"a":1}\n\ndata:{"b":2}\r\n\r\nevent: x\ndata: \xc3\xa9\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a":1}', b'{"b":2}', b"\xc3\xa9", DONE]


@given(st.lists(st.integers(0, len(STREAM))))
def test_any_cut_of_the_bytes_gives_the_same_events(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    reader = SseReader()
    pieces = (STREAM[a:b] for a, b in pairwise(bounds))
    assert [data for piece in pieces for data in reader.feed(piece)] == EVENTS


def test_an_unfinished_line_waits() -> None:
    reader = SseReader()
    assert reader.feed(b"data: {}") == []
    assert reader.feed(b"\n") == [b"{}"]
