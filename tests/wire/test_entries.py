"""What goes into a Redis stream comes out the same, and what we cannot read is refused as EntryMalformed."""

from __future__ import annotations

import contextlib
import json
from typing import Any, Protocol, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies
from wire.entries import (
    VERSION,
    CancelEntry,
    CellCard,
    RedisFields,
    ReplyEntry,
    RequestEntry,
    WorkerEntry,
    pack_tokens,
    unpack_tokens,
)
from wire.errors import EntryMalformed
from wire.ids import GatewayId, RequestId
from wire.sampling import SamplingParams

Entry: TypeAlias = RequestEntry | CancelEntry | ReplyEntry | WorkerEntry | CellCard


class EntryType(Protocol):
    def decode(self, raw: dict[bytes, bytes]) -> Entry: ...


ENTRY_TYPES: list[EntryType] = [RequestEntry, CancelEntry, ReplyEntry, WorkerEntry, CellCard]

entries: st.SearchStrategy[Entry] = st.one_of(
    strategies.request_entries,
    strategies.cancel_entries,
    strategies.reply_entries,
    strategies.worker_entries,
    strategies.cell_cards,
)


def through_redis(sent: RedisFields) -> dict[bytes, bytes]:
    """The fields as a reader gets them: redis-py sends numbers as their text, and returns bytes."""
    return {name.encode(): v if isinstance(v, bytes) else str(v).encode() for name, v in sent.items()}


@given(entry=entries)
def test_every_entry_survives_the_trip(entry: Entry) -> None:
    assert type(entry).decode(through_redis(entry.encode())) == entry


@given(
    entry=entries, version=st.integers(-3, 99).filter(lambda v: v != VERSION).map(str) | st.sampled_from(["", "1.0"])
)
def test_a_version_we_do_not_know_is_refused(entry: Entry, version: str) -> None:
    raw = through_redis(entry.encode()) | {b"v": version.encode()}
    with pytest.raises(EntryMalformed, match="version"):
        type(entry).decode(raw)


@given(entry=entries, data=st.data())
def test_a_missing_field_is_refused(entry: Entry, data: st.DataObject) -> None:
    raw = through_redis(entry.encode())
    del raw[data.draw(st.sampled_from(sorted(raw)))]
    with pytest.raises(EntryMalformed):
        type(entry).decode(raw)


@given(entry=entries, data=st.data())
def test_a_missing_key_of_the_body_is_refused(entry: Entry, data: st.DataObject) -> None:
    raw = through_redis(entry.encode())
    body = json.loads(raw[b"body"])
    del body[data.draw(st.sampled_from(sorted(body)))]
    with pytest.raises(EntryMalformed):
        type(entry).decode(raw | {b"body": json.dumps(body).encode()})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("entry_type", ENTRY_TYPES)
@given(body=json_values.map(json.dumps).map(str.encode) | st.binary(max_size=20), prompt=st.binary(max_size=9))
def test_a_body_of_any_other_shape_is_refused(entry_type: EntryType, body: bytes, prompt: bytes) -> None:
    with pytest.raises(EntryMalformed):
        entry_type.decode({b"v": b"1", b"body": body, b"prompt": prompt})


@given(entry=entries, data=st.data())
def test_a_wrong_value_anywhere_in_the_body_raises_nothing_but_entry_malformed(
    entry: Entry, data: st.DataObject
) -> None:
    raw = through_redis(entry.encode())
    body = json.loads(raw[b"body"])
    body[data.draw(st.sampled_from(sorted(body)))] = data.draw(json_values)
    with contextlib.suppress(EntryMalformed):
        type(entry).decode(raw | {b"body": json.dumps(body).encode()})


@pytest.mark.parametrize(
    "body", [b'{"fence": Infinity, "items": []}', b'{"fence": 1e999, "items": []}', b"[" * 100_000]
)
def test_extreme_json_is_refused(body: bytes) -> None:
    with pytest.raises(EntryMalformed):
        ReplyEntry.decode({b"v": b"1", b"body": body})


@pytest.mark.parametrize(
    "row",
    [
        [],
        ["x", "r"],
        ["t", "r", 0, 0],
        ["t", 5, 0, 0, [1], None],
        ["t", "r", "0", 0, [1], None],
        ["t", "r", 0, 0.0, [1], None],
        ["t", "r", 0, 0, [1, "2"], None],
        ["t", "r", 0, 0, [True], None],
        ["t", "r", 0, 0, 5, None],
        ["c", "r", 0, 1, "stop", 2],
        "t",
    ],
)
def test_an_unknown_reply_item_is_refused(row: Any) -> None:
    body = json.dumps({"fence": 1, "items": [row]}).encode()
    with pytest.raises(EntryMalformed, match="reply entry"):
        ReplyEntry.decode({b"v": b"1", b"body": body})


GOOD = RequestEntry(RequestId("r"), GatewayId("g"), [5], SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 100_000),
        ("id", ["a"]),
        ("id", None),
        ("id", "\ud800"),
        ("id", "x" * 10_000),
        ("gw", None),
        ("priority", 10**40),
        ("deadline", "soon"),
        ("arrived", float("inf")),
        ("traceparent", "z" * 3000),
        ("sampling.max_tokens", "x"),
        ("sampling.max_tokens", None),
        ("sampling.max_tokens", True),
        ("sampling.max_tokens", 2.5),
        ("sampling.max_tokens", 10**30),
        ("sampling.temperature", "hot"),
        ("sampling.temperature", -1.0),
        ("sampling.temperature", float("nan")),
        ("sampling.seed", -1),
        ("sampling.seed", 2**70),
        ("sampling.top_p", 0.0),
        ("sampling.repetition_penalty", 0.0),
        ("sampling.stop_token_ids", [-5]),
        ("sampling.stop_token_ids", "ab"),
        ("sampling.logit_bias", [[-1, 2.0]]),
        ("sampling.logit_bias", [[1]]),
        ("sampling.logprobs", 10**6),
        ("sampling.ignore_eos", "yes"),
    ],
)
def test_a_request_that_would_harm_its_reader_is_refused_by_field(name: str, value: Any) -> None:
    raw = through_redis(GOOD.encode())
    body = json.loads(raw[b"body"])
    *path, last = name.split(".")
    target = body[path[0]] if path else body
    target[last] = value
    with pytest.raises(EntryMalformed, match=last):
        RequestEntry.decode(raw | {b"body": json.dumps(body).encode()})


@given(entry=strategies.worker_entries)
def test_a_field_added_by_a_later_build_is_ignored(entry: WorkerEntry) -> None:
    raw = through_redis(entry.encode())
    body = json.loads(raw[b"body"]) | {"zone": "a"}
    assert WorkerEntry.decode(raw | {b"body": json.dumps(body).encode()}) == entry


@given(tokens=strategies.few(strategies.u32, 50))
def test_token_ids_are_packed_as_little_endian_u32(tokens: list[int]) -> None:
    packed = pack_tokens(tokens)
    assert packed == b"".join(token.to_bytes(4, "little") for token in tokens)
    assert unpack_tokens(packed) == tokens


@pytest.mark.parametrize("length", [1, 2, 3, 5, 4097])
def test_packed_tokens_of_a_broken_length_are_refused(length: int) -> None:
    with pytest.raises(EntryMalformed, match=f"{length} bytes"):
        unpack_tokens(bytes(length))
