"""A mesh of the real model whose workers have gates, and what its tests ask and expect."""

from __future__ import annotations

import asyncio
import shutil
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

import aiohttp
from tokenizers import Tokenizer

from tests.exactness.prompts import PROMPTS
from tests.exactness.reference import committed, encode_prompt
from tests.mesh.client import Completion, events
from tests.mesh.conftest import eventually
from tests.mesh.gated_worker import GATES
from tests.mesh.gates import Gate
from tests.mesh.hosts import wait_pools_at_rest
from tests.mesh.stack import MeshStack, Service

PULLS = "phasemesh_scheduler_pulls_total"
SETTINGS = {
    "KV_PAGE_SIZE": "16",
    "KV_PAGES": "400",
    "STEP_TOKEN_BUDGET": "64",
    "ITL_TARGET_MS": "inf",
    "NO_WORKER_GRACE_S": "60",
    "PULL_LEASE_MS": "30000",  # a pull that waits at a gate is silent
}
END_S = 60.0
"""A stream that takes longer is stuck."""


class GatedStack(MeshStack):
    """Workers of these roles, each with its gates; worker_env: what else each has of its own, see MeshStack."""

    def __init__(
        self,
        model_dir: Path,
        directory: Path,
        roles: Sequence[str],
        worker_env: Sequence[Mapping[str, str]] | None = None,
        /,
        **env: object,
    ) -> None:
        self._gates = directory / "gates"
        self._scheduler_environment: dict[str, str] = {}
        self._schedulers = 0
        self.model_dir = model_dir
        settings = SETTINGS | {name: str(value) for name, value in env.items()}
        worker_env = worker_env or [{}] * len(roles)
        own = [{"WORKER_ROLE": role, **other} for role, other in zip(roles, worker_env, strict=True)]
        super().__init__(model_dir, directory, worker_env=own, env=settings)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._wait_at_rest()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _service(self, name: str, module: str, environment: dict[str, str], port_variable: str) -> Service:
        if module == "scheduler":
            self._scheduler_environment = environment
        if module == "gpu_worker":
            module = "tests.mesh.gated_worker"
            gates = self._gates / name
            gates.mkdir(parents=True)
            environment = environment | {GATES: str(gates)}
        return super()._service(name, module, environment, port_variable)

    def pull_by(self, transport: str) -> None:
        """shm or grpc, from now on."""
        for worker in self.workers:
            forced = self._gates / worker.name / "grpc"
            if transport == "grpc":
                forced.touch()
            else:
                forced.unlink(missing_ok=True)

    async def kill_scheduler(self, successor: str) -> None:
        """kill -9, and wait until its successor is active: a "restart", or a "standby" that waited for the lease."""
        if successor == "restart":
            self.scheduler.kill()
            self.scheduler.start()
        else:
            active, self._schedulers = self.scheduler, self._schedulers + 1
            standby = self._service(
                f"standby-{self._schedulers}", "scheduler", self._scheduler_environment, "SCHEDULER_PORT"
            )
            standby.start()
            try:
                await eventually("the standby waits", lambda: _answers(standby), 30)
            finally:
                active.kill()
                self.scheduler = standby
        await asyncio.to_thread(self.scheduler.wait_healthy)

    def kill_redis(self, *, keeps_data: bool) -> None:
        """kill -9. keeps_data: it will find again what it held."""
        self.redis.kill()
        if not keeps_data:
            for path in self.directory.glob("appendonly*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    async def start_redis(self) -> None:
        """Once everybody knows that it was killed."""
        await eventually("the gateway misses Redis", lambda: not self.gateway.is_healthy(), 30)
        self.redis.start()

    def gate(self, worker: Service, point: str, lets_pass: int = 0) -> Gate:
        """lets_pass: so many come through before it holds one up."""
        return Gate(self._gates / worker.name, point, lets_pass)

    def pulls(self, transport: str) -> int:
        """That brought all they should, since the scheduler started."""
        return int(
            sum(
                n for labels, n in self.scheduler.samples(PULLS).items() if transport in labels and "complete" in labels
            )
        )

    async def worker_that_runs(self) -> Service:
        """Wait until some worker runs a sequence."""
        deadline_s = time.monotonic() + 30
        while True:
            for worker in self.workers:
                if await asyncio.to_thread(worker.metric, "phasemesh_worker_sequences") > 0:
                    return worker
            assert time.monotonic() < deadline_s, "no worker runs anything"

    def other(self, worker: Service) -> Service:
        return next(other for other in self.workers if other is not worker)

    async def at_rest(self) -> None:
        """Every service is ready, every worker is known, and none holds a page for anybody."""
        await asyncio.to_thread(self._wait_at_rest)

    def _wait_at_rest(self) -> None:
        for service in self.services:
            service.wait_healthy()
        wait_pools_at_rest(self.scheduler, [worker.name for worker in self.workers], 30.0)


class Stream:
    """A greedy request under way, without an end of its own before max_tokens."""

    _salts = count()

    def __init__(self, session: aiohttp.ClientSession, url: str, prompt: list[int], **params: Any) -> None:
        self.tokens: list[int] = []
        self.result = Completion()
        self._grown = asyncio.Event()
        wanted = {"temperature": 0, "ignore_eos": True, "return_token_ids": True} | params
        self._task = asyncio.create_task(self._follow(session, url, prompt, wanted))

    @classmethod
    def salt(cls) -> str:
        """Of a cache that nobody used before."""
        return f"salt-{next(cls._salts)}"

    async def _follow(
        self, session: aiohttp.ClientSession, url: str, prompt: list[int], wanted: dict[str, Any]
    ) -> None:
        try:
            async for event in events(session, url, prompt, **wanted):
                if "error" in event:
                    self.result.error = event["error"]
                    return
                if event.get("usage"):
                    details = event["usage"]["prompt_tokens_details"] or {}
                    self.result.cached_tokens = details.get("cached_tokens", 0)
                for choice in event["choices"]:
                    self.tokens += choice.get("token_ids") or []
                    self.result.text += choice["text"]
                    self.result.finish_reason = choice["finish_reason"] or self.result.finish_reason
                self._grown.set()
        finally:
            self._grown.set()

    async def has(self, number: int) -> None:
        """Wait until so many tokens came."""
        async with asyncio.timeout(END_S):
            while len(self.tokens) < number:
                assert not self._task.done(), (self.result, len(self.tokens))
                self._grown.clear()
                await self._grown.wait()

    async def end(self) -> list[int]:
        """All its tokens, once it has ended as it should."""
        await asyncio.wait_for(self._task, END_S)
        assert self.result.error is None, self.result.error
        assert self.result.finish_reason == "length"
        return self.tokens

    async def leave(self) -> None:
        """The client goes away, if it is still there."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task


def _answers(scheduler: Service) -> bool:
    """It is there, active or not."""
    try:
        with urllib.request.urlopen(scheduler.health_url.replace("/health", "/live"), timeout=2.0) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def prompt_and_answer(model_dir: Path, name: str) -> tuple[list[int], list[int]]:
    """Token ids of one of the exactness prompts, and of the reference's greedy answer."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    prompt = next(p for p in PROMPTS if p.name == name)
    return encode_prompt(prompt, tokenizer), committed()[name].tokens
