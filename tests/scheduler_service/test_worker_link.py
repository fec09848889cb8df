from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from observability.tracing import NullSpan, NullTracer, Span
from scheduler import worker_link
from scheduler.commands import DispatchPlan
from scheduler.events import Event, RequestArrived, StepReported, WorkerDown, WorkerUp
from scheduler.lease import Lease
from scheduler.pending import PendingRequest
from scheduler.worker_registry import WorkerRegistry
from tests.engine.paged_worker import CARD
from tests.redis_fixture import RedisServer, free_port
from tests.scheduler_service.parts import CELL, Parts, request_entry, until
from tests.scheduler_service.scripted_worker import ScriptedWorker, register, register_at, serve
from wire import keys
from wire.entries import TerminalReply
from wire.errors import FenceLost
from wire.ids import Epoch, PlanId, RequestId, WorkerId
from wire.plan import StepPlan

W1 = WorkerId("w1")
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


class FixedTracer(NullTracer):
    """Every span has the same traceparent."""

    def start_span(self, *args: object, **kwargs: object) -> Span:
        return NullSpan(TRACEPARENT)


def build_registry(parts: Parts) -> WorkerRegistry:
    return WorkerRegistry(
        parts.redis,
        CELL,
        parts.lease,
        scheduler_id="s1",
        inbox=parts.inbox,
        clock=parts.clock,
        tracer=FixedTracer(),
        model_known=parts.arrivals.model_known,
        is_idle=lambda: not parts.pending.all(),
    )


@pytest.fixture
async def registry(parts: Parts) -> AsyncIterator[WorkerRegistry]:
    built = build_registry(parts)
    task = asyncio.create_task(built.run())
    yield built
    task.cancel()
    await asyncio.wait([task])


async def next_event(parts: Parts, kind: type[Event], timeout_s: float = 5.0) -> Event:
    event = await asyncio.wait_for(parts.inbox.get(), timeout_s)
    assert isinstance(event, kind), event
    return event


async def worker_up(parts: Parts) -> WorkerUp:
    event = await next_event(parts, WorkerUp)
    assert isinstance(event, WorkerUp)
    return event


async def worker_down(parts: Parts, timeout_s: float = 5.0) -> WorkerDown:
    event = await next_event(parts, WorkerDown, timeout_s)
    assert isinstance(event, WorkerDown)
    return event


def empty_plan(parts: Parts, plan_id: int) -> StepPlan:
    """Runs no step; is reported all the same."""
    return StepPlan(PlanId(plan_id), parts.fence, max_steps=0)


async def test_plans_go_out_and_reports_come_in(parts: Parts, registry: WorkerRegistry) -> None:
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        up = await worker_up(parts)
        assert up.info == worker.paged.info
        assert worker.fences == [parts.fence]
        assert worker.metadata["traceparent"] == TRACEPARENT
        for plan_id in (1, 2):
            registry.send(DispatchPlan(W1, Epoch(1), empty_plan(parts, plan_id)))
        for plan_id in (1, 2):
            event = await next_event(parts, StepReported)
            assert isinstance(event, StepReported)
            assert (event.worker_id, event.epoch, event.report.plan_id) == (W1, 1, plan_id)


async def test_a_plan_for_a_session_that_is_gone_is_dropped(parts: Parts, registry: WorkerRegistry) -> None:
    worker = ScriptedWorker(epoch=2)
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        registry.send(DispatchPlan(W1, Epoch(1), empty_plan(parts, 1)))
        registry.send(DispatchPlan(WorkerId("unknown"), Epoch(1), empty_plan(parts, 1)))
        registry.send(DispatchPlan(W1, Epoch(2), empty_plan(parts, 7)))
        event = await next_event(parts, StepReported)
        assert isinstance(event, StepReported) and event.report.plan_id == 7


async def test_a_worker_that_restarts_at_its_address_is_connected_again(parts: Parts, registry: WorkerRegistry) -> None:
    port = free_port()
    async with serve(ScriptedWorker(epoch=1), port) as server:
        await register_at(parts.redis, CELL, W1, f"127.0.0.1:{port}", 1)
        await worker_up(parts)
        await server.stop(None)
        down = await worker_down(parts, timeout_s=1)
        assert (down.worker_id, down.epoch) == (W1, 1) and down.reason
    async with serve(ScriptedWorker(epoch=2), port):
        assert (await worker_up(parts)).info.epoch == 2


async def test_a_worker_that_moves_is_followed_though_its_old_session_is_open(
    parts: Parts, registry: WorkerRegistry
) -> None:
    old, new = ScriptedWorker(epoch=1), ScriptedWorker(epoch=2)
    async with serve(old), serve(new):
        await register(parts.redis, CELL, old)
        await worker_up(parts)
        await register(parts.redis, CELL, new)
        assert (await worker_down(parts)).epoch == 1
        assert (await worker_up(parts)).info.epoch == 2


async def test_an_open_session_outlives_its_registration_and_is_not_renewed_without_one(
    parts: Parts, registry: WorkerRegistry
) -> None:
    worker = ScriptedWorker()
    async with serve(worker) as server:
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        await parts.redis.delete(keys.workers(CELL))
        registry.send(DispatchPlan(W1, Epoch(1), empty_plan(parts, 1)))
        await next_event(parts, StepReported)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(parts.inbox.get(), 0.6)
        await server.stop(None)
        await worker_down(parts)
    again = ScriptedWorker(epoch=2)
    async with serve(again):
        await register(parts.redis, CELL, again)
        assert (await worker_up(parts)).info.epoch == 2


@pytest.mark.parametrize("revision", ["r9", f"{CARD.revision}-int8"])
async def test_a_worker_with_another_model_or_weights_of_another_type_is_refused(
    revision: str, parts: Parts, registry: WorkerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    first = ScriptedWorker("w1")
    other = ScriptedWorker("w2", card=replace(CARD, revision=revision))
    async with serve(first), serve(other):
        await register(parts.redis, CELL, first)
        await worker_up(parts)
        await register(parts.redis, CELL, other)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(parts.inbox.get(), 0.6)
    assert "refused: serves" in caplog.text and revision in caplog.text


async def test_another_model_is_taken_once_no_worker_and_no_request_of_the_first_is_left(
    parts: Parts, registry: WorkerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    port, small = free_port(), replace(CARD, revision="r9", vocab_size=6)
    await register_at(parts.redis, CELL, W1, f"127.0.0.1:{port}", 1)
    async with serve(ScriptedWorker(epoch=1), port) as server:
        await worker_up(parts)
        await parts.arrivals.accept(PendingRequest(request_entry("first"), "interactive", b"1-0"))
        await next_event(parts, RequestArrived)
        await server.stop(None)
        await worker_down(parts)
    async with serve(ScriptedWorker(epoch=2, card=small), port):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(parts.inbox.get(), 0.6)
        assert "refused: serves" in caplog.text
        parts.terminals.finish(TerminalReply(RequestId("first")))
        assert (await worker_up(parts)).info.model == small
        await parts.arrivals.accept(PendingRequest(request_entry("next"), "interactive", b"2-0"))
        assert parts.pending.all() == [], "token 8 is not in the new model's vocabulary"
    assert "the cell serves another model now" in caplog.text


@asynccontextmanager
async def worker_process(port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.scheduler_service.scripted_worker", str(port), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        await asyncio.wait_for(process.stdout.readline(), 20)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize(("death", "noticed_within_s"), [(signal.SIGKILL, 1.5), (signal.SIGSTOP, 4.0)])
async def test_a_killed_worker_is_noticed_at_once_and_a_frozen_one_soon(
    parts: Parts, registry: WorkerRegistry, death: signal.Signals, noticed_within_s: float
) -> None:
    port = free_port()
    async with worker_process(port) as process:
        await register_at(parts.redis, CELL, W1, f"127.0.0.1:{port}", 1)
        await worker_up(parts)
        died_s = time.monotonic()
        os.kill(process.pid, death)
        await worker_down(parts)
        assert time.monotonic() - died_s < noticed_within_s


async def test_links_stay_while_redis_is_away(
    parts: Parts, registry: WorkerRegistry, redis_server: RedisServer
) -> None:
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        redis_server.kill()
        await asyncio.sleep(0.3)
        registry.send(DispatchPlan(W1, Epoch(1), empty_plan(parts, 1)))
        await next_event(parts, StepReported)


async def test_a_worker_that_does_not_read_loses_its_session(
    parts: Parts, registry: WorkerRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "MAX_UNSENT_PLANS", 2)
    worker = ScriptedWorker()
    async with serve(worker):
        await register(parts.redis, CELL, worker)
        await worker_up(parts)
        for plan_id in range(1, 4):  # before the writing task runs even once
            registry.send(DispatchPlan(W1, Epoch(1), empty_plan(parts, plan_id)))
        events = [await asyncio.wait_for(parts.inbox.get(), 5)]
        while not isinstance(events[-1], WorkerDown):
            events.append(await asyncio.wait_for(parts.inbox.get(), 5))
        assert "does not read" in events[-1].reason
        await worker_up(parts)


async def test_a_refused_fence_ends_the_tenure_only_if_it_is_lost(parts: Parts) -> None:
    worker = ScriptedWorker()
    worker.refuse_fence = True
    running = asyncio.create_task(build_registry(parts).run())
    async with serve(worker):
        await register(parts.redis, CELL, worker)

        async def tried_again() -> bool:
            return len(worker.fences) > 1

        await until(tried_again)
        await parts.redis.delete(keys.lease(CELL))
        await Lease(parts.redis, CELL, "usurper").acquire()
        with pytest.raises(ExceptionGroup) as lost:
            await asyncio.wait_for(running, 5)
    assert lost.group_contains(FenceLost)
