"""Workloads from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.prompts import Messages, PromptRequest, Text, TokenIds, Workload
from bench.trace_file import file_workload
from wire.errors import ConfigInvalid

HELLO = {"prompt": "hello", "max_tokens": 4}
TURN = {"role": "user", "content": "hi"}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path, requests: int | None = None) -> Workload:
    return file_workload(path, requests=requests, warm_up=1, param="P")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "w.jsonl"


def test_every_kind_of_prompt(file: Path) -> None:
    lines = ({"messages": [TURN], "max_tokens": 2}, {"prompt_token_ids": [5, 6], "max_tokens": 3})
    workload = read(write(file, HELLO, "", *lines))
    assert workload.name == "w.jsonl"
    assert workload.requests == [
        PromptRequest(Text("hello"), 4),
        PromptRequest(Messages((TURN,)), 2),
        PromptRequest(TokenIds((5, 6)), 3),
    ]


def test_the_warm_up_is_short_and_of_the_files_kind(file: Path) -> None:
    assert read(write(file, HELLO)).warm_up == [PromptRequest(Text("Hello"), 8)]
    assert read(write(file, {"prompt_token_ids": [5, 6], "max_tokens": 3})).warm_up[0].prompt == TokenIds((5,))


def test_times_are_sent_in_order(file: Path) -> None:
    workload = read(write(file, HELLO | {"at_s": 2}, HELLO | {"at_s": 0.5}))
    assert [r.at_s for r in workload.requests] == [0.5, 2.0]


def test_the_first_lines_are_taken(file: Path) -> None:
    write(file, HELLO, HELLO | {"max_tokens": 9})
    assert [r.max_tokens for r in read(file, 1).requests] == [4]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: "),
        ([1], "line 2: not a JSON object"),
        (HELLO | {"temperature": 1}, "unknown field 'temperature'"),
        ({"max_tokens": 1}, "exactly one of prompt, messages, prompt_token_ids"),
        (HELLO | {"messages": [TURN]}, "exactly one of"),
        ({"prompt": "", "max_tokens": 1}, "prompt must be a string, not empty"),
        ({"messages": ["hi"], "max_tokens": 1}, "messages must be a list of objects"),
        ({"prompt_token_ids": [1, True], "max_tokens": 1}, "prompt_token_ids must be a list of integers"),
        ({"prompt": "x"}, "max_tokens must be a positive integer"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens must be a positive integer"),
        (HELLO | {"at_s": -1}, "at_s must be a number of seconds"),
        ('{"prompt": "x", "max_tokens": 1, "at_s": NaN}', "at_s must be a number of seconds"),
        (HELLO | {"at_s": 1}, "some lines have at_s and some do not"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong(file: Path, line: Any, complaint: str) -> None:
    write(file, HELLO, line)
    with pytest.raises(ConfigInvalid) as caught:
        read(file)
    assert caught.value.param == "P" and complaint in caught.value.message


def test_a_file_that_cannot_be_read_or_is_too_short(file: Path) -> None:
    with pytest.raises(ConfigInvalid, match="No such file"):
        read(file)
    with pytest.raises(ConfigInvalid, match="holds 0 requests"):
        read(write(file, ""))
    with pytest.raises(ConfigInvalid, match="holds 1 requests, 2 wanted"):
        read(write(file, HELLO), 2)
