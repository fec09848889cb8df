"""Reads a request's body within bounds of size and of time on the event loop."""

from __future__ import annotations

import asyncio
import codecs
import pickle
import sys
from contextlib import suppress
from typing import Any

from aiohttp import hdrs, web

from gateway.api.json_body import parse_object
from gateway.errors import ERROR_CODE, BodyTooSlow, UnsupportedMediaType, error_response
from wire.child import importing_as_we_do
from wire.errors import InvalidRequest, MeshError, Overloaded, RequestTooLarge

INLINE_BYTES = 512 * 1024
"""A larger body is parsed in a process: json holds the GIL, 12 ms per MiB of token ids, so a thread would not help.
Starting the process takes some 60 ms, little beside sending such a body."""
MAX_PROCESSES = 2
MAX_WAITING = 32
"""Large bodies that wait for a process; more get 429."""
PARSE_TIMEOUT_S = 30.0
BODY_TIMEOUT_S = 60.0
"""Longest time from a request's header to the end of its body."""
_ENCODINGS = ("identity", "gzip", "deflate")
"""Those that aiohttp undoes with nothing further installed."""


class BodyReader:
    """Turns bodies into JSON objects."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._processes = asyncio.Semaphore(MAX_PROCESSES)
        self._num_waiting = 0

    async def read_object(self, request: web.Request) -> dict[str, Any]:
        """The body's JSON object; long lists of integers may come as array('q').

        Raises RequestTooLarge and UnsupportedMediaType (at once if the headers say so), BodyTooSlow, InvalidRequest,
        Overloaded.
        """
        self._check_length(request)
        _check_media(request)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise self._too_large() from error
        except TimeoutError as error:
            raise BodyTooSlow(f"the body did not come within {BODY_TIMEOUT_S:.0f} s") from error
        if len(raw) <= INLINE_BYTES:
            return parse_object(raw)
        if self._num_waiting >= MAX_WAITING:
            raise Overloaded("too many large bodies are waiting to be parsed", retry_after_s=1.0)
        self._num_waiting += 1
        try:
            async with self._processes:
                return await _parse_elsewhere(raw)
        finally:
            self._num_waiting -= 1

    async def expect_continue(self, request: web.Request) -> web.StreamResponse | None:
        """Answers `Expect: 100-continue`: a client that asks before sending never sends what is too large."""
        if request.headers[hdrs.EXPECT].lower() != "100-continue":
            raise web.HTTPExpectationFailed
        try:
            self._check_length(request)
        except RequestTooLarge as error:
            request[ERROR_CODE] = error.code
            return error_response(error)
        with suppress(ConnectionError):  # a client that has left: its handler is about to be cancelled
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    def _check_length(self, request: web.Request) -> None:
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the body is larger than {self._max_bytes // 2**20} MiB")


def _check_media(request: web.Request) -> None:
    """Raises UnsupportedMediaType for a body that is not UTF-8 or is encoded in a way we do not know."""
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "identity")
    if encoding.strip().lower() not in _ENCODINGS:
        raise UnsupportedMediaType(f"Content-Encoding {encoding[:64]!r} is not one of {', '.join(_ENCODINGS)}")
    charset = request.charset
    try:
        known = charset is None or codecs.lookup(charset).name in ("utf-8", "ascii")
    except (LookupError, ValueError):
        known = False
    if not known:
        raise UnsupportedMediaType(f"the body's charset must be utf-8, not {(charset or '')[:64]!r}")


async def _parse_elsewhere(raw: bytes) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.api.json_process"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=importing_as_we_do(),
        start_new_session=True,  # a terminal's Ctrl-C is for the gateway, which drains
    )
    try:
        async with asyncio.timeout(PARSE_TIMEOUT_S):
            output, _ = await child.communicate(raw)
    except TimeoutError as error:
        raise InvalidRequest("the body takes too long to parse") from error
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode != 0:
        raise MeshError("the body's parser died")
    parsed: tuple[dict[str, Any] | None, InvalidRequest | None] = pickle.loads(output)
    found, problem = parsed
    if problem is not None:
        raise problem
    assert found is not None
    return found
