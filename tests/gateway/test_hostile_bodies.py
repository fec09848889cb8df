"""Bodies that are no JSON, no UTF-8, too large, too deep: refused, and nothing else notices."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import psutil
import pytest

from tests.gateway.conftest import Stack, StackOpener
from tests.gateway.scripted_scheduler import saying

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 2**20


def body(prompt: str) -> bytes:
    """`prompt`: JSON text."""
    return b'{"model": "smollm2", "prompt": ' + prompt.encode() + b"}"


NOT_JSON = {
    "empty": b"",
    "word": b"hello",
    "unfinished": b'{"model": "smollm2"',
    "trailing": b'{"model": "smollm2"} x',
    "array": b"[]",
    "string": b'"smollm2"',
    "number": b"5",
    "null": b"null",
    "nan": body("1").replace(b"}", b', "temperature": NaN}'),
    "infinity": body("1").replace(b"}", b', "temperature": Infinity}'),
    "minus infinity": body("1").replace(b"}", b', "temperature": -Infinity}'),
    "overflowing float": body('"x"').replace(b"}", b', "temperature": 1e999}'),
    "integer of 5000 digits": body('"x"').replace(b"}", b', "seed": ' + b"1" * 5000 + b"}"),
    "invalid utf-8": body('"x"').replace(b"x", b"\xff\xfe"),
    "cut utf-8": body('"x"').replace(b"x", b"\xe2\x82"),
    "encoded surrogate": body('"x"').replace(b"x", b"\xed\xa0\x80"),
    "utf-16": '{"model": "smollm2"}'.encode("utf-16"),
    "byte order mark": b"\xef\xbb\xbf{}",
    "lone surrogate": body('"\\ud800"'),
    "lone low surrogate in a name": b'{"\\udc00": 1}',
    "name twice": b'{"model": "smollm2", "prompt": "a", "prompt": "b"}',
    "nested arrays": body("[" * 100_000 + "]" * 100_000),
    "nested objects": body('{"a":' * 100_000 + "1" + "}" * 100_000),
    "raw newline": body('"a\nb"'),
}


@pytest.mark.parametrize("raw", NOT_JSON.values(), ids=NOT_JSON.keys())
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_is_no_json_object_is_refused(stack: Stack, path: str, raw: bytes) -> None:
    status, answer = await stack.post_raw(path, raw)
    assert status == 400, answer
    assert answer["error"]["code"] == "invalid_request"
    assert len(answer["error"]["message"]) < 300
    assert await stack.scheduler.live() == 0
    assert await stack.scheduler.backlog() == 0


async def test_a_paired_surrogate_escape_is_a_character(stack: Stack) -> None:
    stack.scheduler.script = saying([2])
    assert (await stack.post_raw("/v1/completions", body('"\\ud83e\\udd9c"')))[0] == 200
    assert (await stack.scheduler.arrived.get()).prompt == stack.encode("🦜")


async def test_a_large_body_is_parsed_like_a_small_one(stack: Stack) -> None:
    stack.scheduler.script = saying([2])
    prompts = [[token % 49152 for token in range(1000 * i, 1000 * i + 2000)] for i in range(60)]
    raw = body(json.dumps(prompts))
    assert len(raw) > 512 * 1024
    status, answer = await stack.post_raw("/v1/completions", raw)
    assert status == 200, answer
    arrived = [(await stack.scheduler.arrived.get()).prompt for _ in prompts]
    assert arrived == prompts
    for large, message in ((raw[:-1], "not valid JSON"), (raw.replace(b" 999,", b" true,"), "a boolean")):
        status, answer = await stack.post_raw("/v1/completions", large)
        assert status == 400
        assert message in answer["error"]["message"]


async def test_a_20_mb_prompt_delays_nobody(stack: Stack) -> None:
    """Three shapes of 20 MB each, and meanwhile the CPU of the longest turn of the event loop that everybody shares."""
    longest_s = 0.0

    async def watch() -> None:
        nonlocal longest_s
        while True:
            started_s = time.thread_time()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.thread_time() - started_s)

    bodies = [body(json.dumps("Hello, world! " * 1_430_000)), body('"' + "\\n\\u00e9" * 2_500_000 + '"')]
    bodies.append(body("[" + ",".join(["12345"] * 3_400_000) + "]"))
    watcher = asyncio.create_task(watch())
    for raw in bodies:
        status, answer = await stack.post_raw("/v1/completions", raw)
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    watcher.cancel()
    # The client shares this loop: what counts is that no parse (0.2 s and more of CPU) is in it.
    assert longest_s < 0.15


def tokenizing() -> set[int]:
    """Pids of our children that are at work on a large text."""
    return {child.pid for child in psutil.Process().children() if _is_busy_tokenizer(child)}


def _is_busy_tokenizer(child: psutil.Process) -> bool:
    try:
        return "gateway.text.tokenizer_process" in child.cmdline() and child.memory_info().rss > 400 * MIB
    except psutil.NoSuchProcess:  # it ended meanwhile; a zombie is one too
        return False


async def test_a_20_mb_prompt_that_fits_is_tokenized_while_others_are_answered(new_stack: StackOpener) -> None:
    """The context is so long that its length does not refuse it: it goes through the tokenizer, for many seconds."""
    long = body(json.dumps("The quick brown fox jumps over 12,345 lazy dogs. " * 400_000))
    async with new_stack(saying([5, 2]), card={"max_model_len": 2**26, "max_request_tokens": 2**26}) as stack:
        unanswered = asyncio.create_task(stack.post_raw("/v1/completions", long))
        try:
            async with asyncio.timeout(30):
                while not (busy := tokenizing()):  # noqa: ASYNC110  # another process can only be polled
                    await asyncio.sleep(0.01)
            for _ in range(20):
                assert (await stack.complete("Hello"))[0] == 200
            assert tokenizing() == busy  # the same process, with the same text
            assert not unanswered.done()
            arrived = [await stack.scheduler.arrived.get() for _ in range(20)]
            assert stack.scheduler.arrived.empty()
            assert all(len(entry.prompt) == 1 for entry in arrived)
        finally:
            unanswered.cancel()  # the rest takes 15 s and 3 GB
            await asyncio.wait([unanswered])


async def test_a_body_that_says_it_is_too_large_is_refused_unread(stack: Stack) -> None:
    """The headers of 100 MB, and not a byte of it: the answer comes at once."""
    url = urlsplit(stack.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 104857600\r\n\r\n")
    async with asyncio.timeout(2):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_sends_100_mb_reads_its_413(stack: Stack) -> None:
    status, answer = await stack.post_raw("/v1/completions", bytes(100 * MIB))
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    stack.scheduler.script = saying([2])
    assert (await stack.complete())[0] == 200


async def test_a_chunked_body_is_cut_at_the_limit(stack: Stack) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(MIB)

    async with stack.http.post(f"{stack.url}/v1/completions", data=chunks()) as response:
        assert response.status == 413
        assert (await response.json())["error"]["code"] == "request_too_large"


async def test_a_compressed_bomb_is_cut_at_the_limit(stack: Stack) -> None:
    bomb = gzip.compress(bytes(100 * MIB), compresslevel=1)
    status, answer = await stack.post_raw("/v1/completions", bomb, **{"Content-Encoding": "gzip"})
    assert (status, answer["error"]["code"]) == (413, "request_too_large")


async def test_a_body_of_the_wrong_encoding_is_refused(stack: Stack) -> None:
    status, _ = await stack.post_raw("/v1/completions", b"not gzip", **{"Content-Encoding": "gzip"})
    assert status == 400


async def test_expect_continue_is_answered_before_the_body(stack: Stack) -> None:
    stack.scheduler.script = saying([2])
    url = urlsplit(stack.url)
    for length, answer in ((104857600, b"HTTP/1.1 413 "), (len(body('"x"')), b"HTTP/1.1 100 Continue")):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(2):
            assert (await reader.readuntil(b"\r\n")).startswith(answer)
            if b"100" in answer:
                writer.write(body('"x"'))
                await reader.readuntil(b"\r\n")
                assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()


async def test_the_limit_is_configurable(new_stack: StackOpener) -> None:
    async with new_stack(saying([2]), max_body_mb=1) as stack:
        status, answer = await stack.post_raw("/v1/completions", bytes(MIB + 1))
    assert status == 413
    assert "1 MiB" in answer["error"]["message"]
