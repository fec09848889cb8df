"""`phasemesh up`: start the local stack, ask it one question, keep it running, stop it in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

from phasemesh import models, redis_server
from phasemesh.client import ApiError, Client, Generation
from phasemesh.guard import Guard, running_guard
from phasemesh.progress import Progress
from phasemesh.stack import Stack, owns_redis, plan_stack, require_cores, require_ports, worker_roles, worker_threads
from phasemesh.state import ServiceState, StackState, StateDir, start_ticks
from phasemesh.supervisor import Service, SupervisedService, stop_in_order
from wire.api_keys import first_api_key
from wire.config import LauncherConfig, SchedulerConfig, load
from wire.errors import ConfigInvalid, MeshError

QUESTION = "What is the capital of France?"
PROMPT = "The capital of France is"
"""Asked of a model that has no chat template."""
ANSWER_TOKENS = 48
FIRST_ANSWER_TIMEOUT_S = 30.0
RETRY_S = 0.25


class StopRequested(Exception):
    """Ctrl-C, SIGTERM, or the terminal went away."""


def up(config: LauncherConfig, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Run the stack until it is told to stop. Raises MeshError when it cannot run, or a service keeps dying."""
    load(SchedulerConfig, environ)  # its variables are checked here, not first by a child
    state = StateDir.of(config)
    with state.owned():
        require_ports(config)
        require_cores(config)
        worker_roles(config)  # refused before a model is fetched
        if owns_redis(config, environ):
            redis_server.find_server()
        else:
            problem = redis_server.ping(config.gateway.cell.redis_url, config.gateway.cell.cell)
            if problem:
                raise ConfigInvalid(f"Redis does not answer: {problem}", param="PHASEMESH_REDIS_URL")
        model = models.ensure(config.gateway.model, Progress())
        stack = plan_stack(config, environ, model, state)
        with running_guard() as guard:
            asyncio.run(_Launcher(config, stack, state, guard, say).run())


class _Launcher:
    """One run of `up`."""

    def __init__(
        self, config: LauncherConfig, stack: Stack, state: StateDir, guard: Guard, say: Callable[[str], None]
    ) -> None:
        self._config = config
        self._stack = stack
        self._state = state
        self._guard = guard
        self._say = say
        self._supervised: dict[str, SupervisedService] = {}

    async def run(self) -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal, stop)
        try:
            async with asyncio.TaskGroup() as tg:
                tg.create_task(_raise_when(stop))
                tg.create_task(self._serve(tg))
        except* StopRequested:
            self._say(
                f"stopping: running requests get up to {self._config.gateway.drain_s:g} s; "
                "Ctrl-C again ends everything at once"
            )
        except* MeshError as failures:
            raise _first(failures) from None
        finally:
            await stop_in_order(
                [
                    [self._supervised[s.name] for s in group if s.name in self._supervised]
                    for group in self._stack.stop_order
                ]
            )
        self._say("stopped")

    def _on_signal(self, stop: asyncio.Event) -> None:
        if stop.is_set():
            for supervised in self._supervised.values():
                supervised.kill()
        stop.set()

    async def _serve(self, tg: asyncio.TaskGroup) -> None:
        """Start everything, say so, and leave the keepers running in `tg`."""
        if self._stack.redis is not None:
            await self._start(self._stack.redis, tg)
        async with asyncio.TaskGroup() as starting:
            for service in (self._stack.scheduler, *self._stack.workers, self._stack.gateway):
                starting.create_task(self._start(service, tg))
        client = Client(self._stack.gateway_url, first_api_key(self._config.gateway.api_keys))
        model = await asyncio.to_thread(self._ask_once, client)
        self._say(self._welcome(model))

    async def _start(self, service: Service, tg: asyncio.TaskGroup) -> None:
        began = asyncio.get_running_loop().time()
        supervised = SupervisedService(
            service, guard=self._guard, logs=self._state.logs, say=self._say, on_change=self._write_state
        )
        self._supervised[service.name] = supervised
        await supervised.start()
        took_s = asyncio.get_running_loop().time() - began
        self._say(f"{service.name} is ready after {took_s:.1f} s ({service.health_url})")
        tg.create_task(supervised.keep_running())

    def _ask_once(self, client: Client) -> str:
        """Print one streamed answer; returns the model's name. Runs in a thread."""
        model = client.model()
        generation = Generation(max_tokens=ANSWER_TOKENS, temperature=0.0)
        print(f"\n> {QUESTION}", flush=True)
        try:
            _print_answer(lambda: client.chat(model, QUESTION, generation))
        except ApiError as error:
            if error.status != 400:
                raise
            print(f"({error.message})\n> {PROMPT}", end="", flush=True)
            _print_answer(lambda: client.complete(model, PROMPT, generation))
        print(flush=True)
        return model

    def _welcome(self, model: str) -> str:
        url = self._stack.gateway_url
        body = json.dumps(
            {"model": model, "messages": [{"role": "user", "content": "Tell me a joke."}], "stream": True}
        )
        workers = f"{self._config.workers} worker(s) of {worker_threads(self._config)} thread(s)"
        if self._config.worker.simulation.simulate:
            workers = f"{self._config.workers} simulated worker(s): its words mean nothing"
        if self._config.roles:
            workers += f" ({', '.join(worker_roles(self._config))})"
        return f"""
{model} is served at {url}/v1 by {workers}

  try      curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'
  or       {sys.argv[0]} chat --url {url} "Tell me a joke."
  health   {url}/health
  metrics  {url}/metrics
  logs     {self._state.logs}

Ctrl-C stops it."""

    def _write_state(self) -> None:
        pid = os.getpid()
        ticks = start_ticks(pid)
        assert ticks is not None  # we are alive
        services = [
            ServiceState(
                name=s.service.name,
                health_url=s.service.health_url,
                pid=s.process.pid,
                started_unix_s=s.process.started_unix_s,
                restarts=s.restarts,
            )
            for s in self._supervised.values()
            if s.process is not None
        ]
        self._state.write(StackState(pid, ticks, self._stack.gateway_url, services))


def _print_answer(ask: Callable[[], Iterator[str]]) -> None:
    """Print an answer as it comes. Ready services may not have found each other yet: after a 503 it is asked again."""
    deadline_s = time.monotonic() + FIRST_ANSWER_TIMEOUT_S
    while True:
        try:
            for piece in ask():
                print(piece, end="", flush=True)
            return
        except ApiError as error:
            if error.status != 503 or time.monotonic() >= deadline_s:
                raise
            time.sleep(RETRY_S)


def _first(group: BaseExceptionGroup[MeshError]) -> MeshError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, MeshError)
    return error


async def _raise_when(stop: asyncio.Event) -> NoReturn:
    await stop.wait()
    raise StopRequested
