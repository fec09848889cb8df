"""What is no proper HTTP, is left unfinished, or is left early: a clear answer, a bounded wait, a quiet log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from gateway import lifetime
from gateway.api import body as body_reader
from observability import names
from tests.gateway.conftest import Stack, StackOpener
from tests.gateway.scripted_scheduler import saying
from tests.gateway.test_outages import eventually

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
JSON = b'{"model": "smollm2", "prompt": "Hi", "stream": true}'


@asynccontextmanager
async def connection(stack: Stack) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = urlsplit(stack.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        async with asyncio.timeout(10):
            yield reader, writer
    finally:
        writer.close()


def requests_counted(stack: Stack, status: int) -> float:
    labels = {"route": "/v1/completions", "status": str(status)}
    return stack.parts.metrics.registry.get_sample_value(f"{names.GATEWAY_REQUESTS}_total", labels) or 0.0


def problems(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{r.name}: {r.getMessage()}" for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("when", ["prepare", "write", "error"])
async def test_a_client_that_left_before_its_answer_is_no_server_error(
    new_stack: StackOpener, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The transport is closing, and the handler has not been cancelled yet."""

    async def gone(*_: object) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    writes = 0
    write = web.StreamResponse.write

    async def gone_later(self: web.StreamResponse, data: bytes) -> None:
        nonlocal writes
        writes += 1
        if when == "write" or writes > 1:
            await gone()
        await write(self, data)

    async with new_stack() as stack, connection(stack) as (reader, writer):
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(JSON) + JSON)
        entry = await stack.scheduler.arrived.get()
        if when == "prepare":
            monkeypatch.setattr(web.StreamResponse, "prepare", gone)
        else:
            monkeypatch.setattr(web.StreamResponse, "write", gone_later)
        await stack.scheduler.say(entry, stack.encode("Hello"))
        if when == "error":
            await reader.readuntil(b"Hello")
            await stack.scheduler.terminate(entry, "worker_lost")
        else:
            assert (await stack.scheduler.cancelled.get()).request_id == entry.request_id
            await stack.scheduler.terminate(entry)
        assert await reader.read() is not None
        assert requests_counted(stack, 499) == 1
        assert requests_counted(stack, 500) == requests_counted(stack, 200) == 0
    assert problems(caplog) == []


@pytest.mark.parametrize("abort", [False, True])
async def test_a_client_that_leaves_amid_its_body_is_no_server_error(
    new_stack: StackOpener, caplog: pytest.LogCaptureFixture, abort: bool
) -> None:
    async with new_stack() as stack:
        async with connection(stack) as (reader, writer):
            writer.write(HEAD + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n{")
            await reader.readuntil(b"100 Continue\r\n\r\n")
            if abort:
                writer.transport.abort()

        async def counted() -> bool:
            return requests_counted(stack, 499) == 1

        await eventually(counted)
        assert requests_counted(stack, 500) == 0
    assert problems(caplog) == []


@pytest.mark.parametrize(
    "beginning",
    [
        HEAD + b"Content-Length: 100\r\n\r\n{",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
)
async def test_a_body_that_does_not_end_is_answered_408(
    new_stack: StackOpener, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(body_reader, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(lifetime, "LINGER_S", 0.2)
    async with new_stack() as stack, connection(stack) as (reader, writer):
        writer.write(beginning)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer.lower()
        assert b'"code": "request_timeout"' in answer


@pytest.mark.parametrize("beginning", [b"", b"POST /v1/comp", HEAD + b"X-Slow: "])
async def test_a_header_that_does_not_end_is_hung_up_on(
    new_stack: StackOpener, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(lifetime, "IDLE_S", 0.2)
    async with new_stack() as stack, connection(stack) as (reader, writer):
        writer.write(beginning)
        assert await reader.read() == b""


async def test_a_long_answer_and_a_second_request_are_not_hung_up_on(
    new_stack: StackOpener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifetime, "IDLE_S", 0.3)
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(JSON) + JSON
    async with new_stack() as stack, connection(stack) as (reader, writer):
        writer.write(request)
        entry = await stack.scheduler.arrived.get()
        await asyncio.sleep(0.5)  # longer than the bound
        await stack.scheduler.say(entry, [2])
        await stack.scheduler.end(entry, 1)
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        stack.scheduler.script = saying([2])
        writer.write(request)
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
        assert await reader.read() == b""


NOT_HTTP = {
    "no http": b"hello\r\n\r\n",
    "tls": bytes.fromhex("16030100a5010000a10303") + bytes(32) + b"\r\n\r\n",
    "bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "bad later chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\nzz\r\n\r\n",
    "huge header": HEAD + b"X-Huge: " + b"x" * 20_000 + b"\r\n\r\n",
    "many headers": HEAD + b"X-Many: x\r\n" * 1000 + b"\r\n",
    "header without colon": HEAD + b"what\r\n\r\n",
    "bad length": HEAD + b"Content-Length: -5\r\n\r\n",
    "length twice": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "brotli": HEAD + b"Content-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
    "zstd": HEAD + b"Content-Encoding: zstd\r\nContent-Length: 2\r\n\r\n{}",
    "no gzip": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("raw", NOT_HTTP.values(), ids=NOT_HTTP.keys())
async def test_what_is_no_proper_http_leaves_no_traceback(
    new_stack: StackOpener, caplog: pytest.LogCaptureFixture, raw: bytes
) -> None:
    caplog.set_level(logging.DEBUG)
    async with new_stack(saying([2])) as stack:
        async with connection(stack) as (reader, writer):
            writer.write(raw)
            assert (await reader.readuntil(b"\r\n")).startswith((b"HTTP/1.1 4", b"HTTP/1.0 4"))
            writer.write_eof()
            await reader.read()
        assert (await stack.complete())[0] == 200
    assert problems(caplog) == []
    assert [r.name for r in caplog.records if r.exc_info] == []


async def test_an_unforeseen_error_keeps_its_traceback(
    caplog: pytest.LogCaptureFixture, new_stack: StackOpener
) -> None:
    async with new_stack():
        logging.getLogger("aiohttp.server").error("Unhandled exception", exc_info=ValueError("a bug"))
    (record,) = [r for r in caplog.records if r.name == "aiohttp.server"]
    assert record.exc_info


@pytest.mark.parametrize("encoding", ["snappy", "gzip, br", "compress"])
async def test_an_unknown_content_encoding_is_415(new_stack: StackOpener, encoding: str) -> None:
    async with new_stack(saying([2])) as stack:
        status, answer = await stack.post_raw("/v1/completions", JSON, **{"Content-Encoding": encoding})
        assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
        assert answer["error"]["type"] == "invalid_request_error"


async def test_a_charset_other_than_utf_8_is_415(new_stack: StackOpener) -> None:
    text = '{"model": "smollm2", "prompt": "Hi"}'
    async with new_stack(saying([2])) as stack:
        for charset, expected in (("utf-8", 200), ("UTF8", 200), ("us-ascii", 200), ("utf-16", 415), ("what", 415)):
            raw = text.encode("utf-16" if charset == "utf-16" else "utf-8")
            headers = {"Content-Type": f"application/json; charset={charset}"}
            status, answer = await stack.post_raw("/v1/completions", raw, **headers)
            assert status == expected, charset
            if status == 415:
                assert charset in answer["error"]["message"]
