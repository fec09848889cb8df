"""One choice's events: text, stop strings, stop tokens, logprobs and offsets line up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.output import ChoiceOutput
from gateway.text.tokenizer import Tokenizer
from wire.sampling import TokenLogprobs


def test_each_token_is_an_event_with_its_text(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hello, wide world", False)
    output = ChoiceOutput(smollm2, smollm2.encode("Hi", False))
    events = output.push(ids)
    assert [event.token_id for event in events] == ids
    assert [event.text for event in events] == [smollm2.token_text(token_id) for token_id in ids]
    assert output.finish() == ""
    assert (output.num_tokens, output.stopped_by) == (len(ids), None)


def test_offsets_say_where_each_token_begins(smollm2: Tokenizer) -> None:
    text = "naïve 😀 text"
    ids = smollm2.encode(text, False)
    output = ChoiceOutput(smollm2, [], ["xylophone"])
    events = output.push(ids)
    for event in events:
        piece = smollm2.token_text(event.token_id)
        if not piece.startswith("bytes:"):
            assert text[event.text_offset :].startswith(piece)
    assert [event.text_offset for event in events] == sorted(event.text_offset for event in events)


def test_logprobs_stay_with_their_token(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two three", False)
    logprobs = [TokenLogprobs(-float(i), [], []) for i in range(len(ids))]
    output = ChoiceOutput(smollm2, [])
    events = output.push(ids[:1], logprobs[:1]) + output.push(ids[1:], logprobs[1:])
    assert [event.logprobs for event in events] == logprobs


def test_a_stop_string_that_spans_tokens_never_leaks_its_head(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The answer.\n\nUser: more", False)
    output = ChoiceOutput(smollm2, [], ["\n\nUser:"])
    events = [event for token_id in ids for event in output.push([token_id])]
    assert "".join(event.text for event in events) == "The answer."
    assert output.stopped_by == "\n\nUser:"
    assert output.num_tokens == len(events) < len(ids)
    assert output.finish() == ""


def test_tokens_behind_the_stop_string_are_dropped(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("a b STOP c d", False)
    output = ChoiceOutput(smollm2, [], [" STOP"])
    one_call = output.push(ids)
    assert "".join(event.text for event in one_call) == "a b"
    assert output.num_tokens == len(one_call) < len(ids)
    assert output.push(ids) == []


def test_held_back_text_comes_when_it_turns_out_ordinary(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two three", False)
    output = ChoiceOutput(smollm2, [], [" two four"])
    texts = [event.text for event in output.push(ids)]
    assert texts == ["one", "", " two three"]


def test_finish_brings_the_held_back_tail(smollm2: Tokenizer) -> None:
    output = ChoiceOutput(smollm2, [], ["world!"])
    text = "".join(event.text for event in output.push(smollm2.encode("Hello world", False)))
    assert text == "Hello "
    assert output.finish() == "world"


def test_include_stop_keeps_the_stop_string_and_nothing_behind_it(smollm2: Tokenizer) -> None:
    output = ChoiceOutput(smollm2, [], ["wor"], include_stop=True)
    assert "".join(event.text for event in output.push(smollm2.encode("Hello world", False))) == "Hello wor"


def test_a_stop_token_counts_but_shows_no_text(smollm2: Tokenizer) -> None:
    *ids, last = smollm2.encode("one two three", False)
    output = ChoiceOutput(smollm2, [], stop_token_ids={last})
    events = output.push([*ids, last])
    assert [event.text for event in events] == ["one", " two", ""]
    assert output.num_tokens == 3
    assert output.stopped_by is None


def test_a_special_token_shows_no_text(smollm2: Tokenizer) -> None:
    output = ChoiceOutput(smollm2, [])
    assert [event.text for event in output.push([*smollm2.encode("one", False), 2])] == ["one", ""]


def test_min_tokens_lets_an_early_stop_string_pass(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("one two one two", False)
    output = ChoiceOutput(smollm2, [], [" two"], min_tokens=2)
    assert "".join(event.text for event in output.push(ids)) == "one two one"
    assert output.num_tokens == 4


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=20), cuts=st.lists(st.integers(0, 20)), stop=st.text(max_size=3))
def test_how_tokens_arrive_does_not_matter(smollm2: Tokenizer, ids: list[int], cuts: list[int], stop: str) -> None:
    stops = [stop] if stop else []
    at_once = ChoiceOutput(smollm2, [], stops)
    expected = at_once.push(ids)
    output = ChoiceOutput(smollm2, [], stops)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    events = [event for i in range(len(bounds) - 1) for event in output.push(ids[bounds[i] : bounds[i + 1]])]
    assert events == expected
    assert (output.num_tokens, output.stopped_by) == (at_once.num_tokens, at_once.stopped_by)
    assert output.finish() == at_once.finish()
