"""A real gateway on a free port, a real Redis, a scripted scheduler."""

from __future__ import annotations

import asyncio
import io
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import uvloop

from gateway.lifetime import serve
from gateway.parts import Parts
from gateway.redis_link import open_redis
from gateway.text.tokenizer import Tokenizer, load_tokenizer
from observability.tracing import NullTracer, Tracer
from tests.gateway.scripted_scheduler import Script, ScriptedScheduler, silent
from tests.redis_fixture import durable_redis_server, redis_url
from wire.config import CellConfig, GatewayConfig, ModelConfig

__all__ = ["durable_redis_server", "redis_url"]


@dataclass
class Stack:
    """What a test holds."""

    url: str
    parts: Parts
    scheduler: ScriptedScheduler
    http: aiohttp.ClientSession
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, False)

    async def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the answer."""
        async with self.http.post(f"{self.url}{path}", json={"model": "smollm2", **body}) as response:
            return response.status, await response.json()

    async def complete(self, prompt: Any = "Hello", **body: Any) -> tuple[int, dict[str, Any]]:
        return await self.post("/v1/completions", prompt=prompt, **body)

    async def post_raw(self, path: str, raw: bytes, **headers: str) -> tuple[int, dict[str, Any]]:
        """The same for a body of any bytes."""
        async with self.http.post(f"{self.url}{path}", data=io.BytesIO(raw), headers=headers) as response:
            return response.status, await response.json()

    async def health(self) -> tuple[int, dict[str, Any]]:
        async with self.http.get(f"{self.url}/health") as response:
            return response.status, await response.json()


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The event loop that the service runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return load_tokenizer(smollm2_dir)


@asynccontextmanager
async def open_stack(
    redis_url: str,
    model_dir: Path,
    tokenizer: Tokenizer,
    script: Script,
    card: dict[str, Any],
    tracer: Tracer | None = None,
    **config: Any,
) -> AsyncIterator[Stack]:
    """Everything but Redis, in a cell of its own. `config`: fields of GatewayConfig, and `cell_name`."""
    cell = config.pop("cell_name", f"test-{secrets.token_hex(4)}")
    settings = GatewayConfig(
        cell=CellConfig(cell=cell, redis_url=redis_url),
        model=ModelConfig(model=str(model_dir), model_name="smollm2"),
        gateway_id=f"gateway-{cell}",
        port=0,
    )
    async with (
        open_redis(redis_url) as redis,
        ScriptedScheduler(redis, cell, script, **card) as scheduler,
        serve(replace(settings, **config), tracer or NullTracer()) as (parts, port),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http,
    ):
        yield Stack(f"http://127.0.0.1:{port}", parts, scheduler, http, tokenizer)


class StackOpener:
    """`async with open_stack(script, card={…}, drain_s=1.0) as stack`."""

    def __init__(self, redis_url: str, model_dir: Path, tokenizer: Tokenizer) -> None:
        self._where = (redis_url, model_dir, tokenizer)

    @asynccontextmanager
    async def __call__(
        self, script: Script = silent, card: dict[str, Any] | None = None, tracer: Tracer | None = None, **config: Any
    ) -> AsyncIterator[Stack]:
        async with open_stack(*self._where, script, card or {}, tracer, **config) as stack:
            yield stack


@pytest.fixture
def new_stack(redis_url: str, smollm2_dir: Path, tokenizer: Tokenizer) -> StackOpener:
    return StackOpener(redis_url, smollm2_dir, tokenizer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_stack(redis_url: str, smollm2_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[Stack]:
    async with open_stack(redis_url, smollm2_dir, tokenizer, silent, {}) as opened:
        yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def stack(module_stack: Stack) -> Stack:
    """One stack for a module whose tests share an event loop: `pytestmark = pytest.mark.asyncio(loop_scope="module")`.

    It says nothing until the test sets `stack.scheduler.script`.
    """
    scheduler = module_stack.scheduler
    scheduler.script = silent
    for queue in (scheduler.arrived, scheduler.cancelled):
        while not queue.empty():
            queue.get_nowait()
    return module_stack
