"""Timed requests against a stack of our own: what its clients saw, and what the machine spent on it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from bench.client_health import judge, watch_loop
from bench.cpu_time import cpu_s
from bench.load import Send, open_loop
from bench.measure import Outcome
from bench.openai_stream import COMPLETIONS, StreamClient, Target, open_client
from bench.prompts import PromptRequest
from bench.stack import Stack

TIMEOUT_S = 300.0
MAX_IN_FLIGHT = 4096
SATURATED = 0.85
"""Of all cores: from there on processes wait for a core, and the figures are the machine's."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Outcomes are in order of the requests' ends."""

    outcomes: list[Outcome]
    duration_s: float
    cpu_share: float
    """Of all cores: every service and the client."""
    warnings: tuple[str, ...]


def run_load(stack: Stack, requests: Sequence[PromptRequest]) -> Measured:
    """Send each request at its `at_s` to the stack's first model, and wait for all. Prompts are texts or token ids."""
    return uvloop.run(_run(stack, requests))


async def _run(stack: Stack, requests: Sequence[PromptRequest]) -> Measured:
    async with open_client(timeout_s=TIMEOUT_S) as client:
        root = Target(stack.url, COMPLETIONS)
        target = Target(stack.url, COMPLETIONS, model=await client.first_model(root))
        began_s, before_s = time.perf_counter(), _cpu_s(stack)
        async with watch_loop() as watch:
            run = await open_loop(
                _sender(client, target, requests),
                [request.at_s or 0.0 for request in requests],
                1,
                max_in_flight=MAX_IN_FLIGHT,
                clock=time.perf_counter,
            )
        spent_s, took_s = _cpu_s(stack) - before_s, time.perf_counter() - began_s
    [only] = run
    cpu_share = spent_s / took_s / len(os.sched_getaffinity(0))
    warnings = judge(watch, only.outcomes).warnings
    if cpu_share > SATURATED:
        warnings += (f"the machine was {cpu_share:.0%} busy: it was the bottleneck; fewer workers or longer steps",)
    return Measured(only.outcomes, only.duration_s, cpu_share, warnings)


def _sender(client: StreamClient, target: Target, requests: Sequence[PromptRequest]) -> Send:
    async def send(_: int, index: int, due_s: float | None) -> Outcome:
        return await client.send(target, requests[index], due_s)

    return send


def _cpu_s(stack: Stack) -> float:
    """Of the services and this process. A service that was started again since is counted from its new start."""
    return sum(cpu_s(pid) for pid in (*stack.pids().values(), os.getpid()))
