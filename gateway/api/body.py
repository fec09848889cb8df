"""Reads a request's body within bounds of size and of time on the event loop."""

from __future__ import annotations

import asyncio
import pickle
import sys
from contextlib import suppress
from typing import Any

from aiohttp import hdrs, web

from gateway.api.json_body import parse_object
from gateway.errors import ERROR_CODE, error_response
from wire.child import importing_as_we_do
from wire.errors import InvalidRequest, MeshError, Overloaded, RequestTooLarge

INLINE_BYTES = 512 * 1024
"""A larger body is parsed in a process: json holds the GIL, 12 ms per MiB of token ids, so a thread would not help.
Starting the process takes some 60 ms, little beside sending such a body."""
MAX_PROCESSES = 2
MAX_WAITING = 32
"""Large bodies that wait for a process; more get 429."""
PARSE_TIMEOUT_S = 30.0


class BodyReader:
    """Turns bodies into JSON objects."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._processes = asyncio.Semaphore(MAX_PROCESSES)
        self._num_waiting = 0

    async def read_object(self, request: web.Request) -> dict[str, Any]:
        """The body's JSON object; long lists of integers may come as array('q').

        Raises RequestTooLarge (at once if the headers say so), InvalidRequest, Overloaded.
        """
        self._check_length(request)
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise self._too_large() from error
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
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None

    def _check_length(self, request: web.Request) -> None:
        if request.content_length is not None and request.content_length > self._max_bytes:
            raise self._too_large()

    def _too_large(self) -> RequestTooLarge:
        return RequestTooLarge(f"the body is larger than {self._max_bytes // 2**20} MiB")


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
