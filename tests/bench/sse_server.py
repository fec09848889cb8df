"""A real HTTP server that streams what a test scripts, and remembers what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Send:
    """Bytes, flushed at once."""

    data: bytes


@dataclass(frozen=True)
class Wait:
    """Until the test says so."""

    gate: asyncio.Event


@dataclass(frozen=True)
class Refuse:
    """Instead of a stream."""

    status: int
    body: bytes = b'{"error": {"message": "not now"}}'


@dataclass(frozen=True)
class Cut:
    """The connection ends here."""


Step = Send | Wait | Refuse | Cut


def event(**fields: Any) -> Send:
    return Send(b"data: " + json.dumps(fields).encode() + b"\n\n")


def token(text: str, finish_reason: str | None = None) -> Send:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


def delta(finish_reason: str | None = None, **fields: Any) -> Send:
    return event(choices=[{"index": 0, "delta": fields, "finish_reason": finish_reason}])


def usage(prompt: int, completion: int, cached: int | None = None) -> Send:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event(choices=[], usage=counts)


DONE = Send(b"data: [DONE]\n\n")
ANSWER: tuple[Step, ...] = (token("a"), token("b"), token("c", "length"), usage(10, 3, cached=4), DONE)

Script = Callable[[dict[str, Any]], Sequence[Step]]
"""Request body → what to answer."""


@dataclass
class ScriptedServer:
    script: Script = lambda body: ANSWER
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    running: int = 0
    most_running: int = 0

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        self.keys.append(request.headers.get("Authorization"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._play(request, self.script(body))
        finally:
            self.running -= 1

    async def _play(self, request: web.Request, steps: Sequence[Step]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        for step in steps:
            match step:
                case Refuse(status, body):
                    return web.Response(status=status, body=body)
                case Wait(gate):
                    await gate.wait()
                case Send(data):
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(data)
                case Cut():
                    assert request.transport is not None
                    request.transport.abort()
                    break
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})


@asynccontextmanager
async def serve(script: Script | None = None) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer() if script is None else ScriptedServer(script)
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/v1/completions", server.generate)
    app.router.add_post("/v1/chat/completions", server.generate)
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
