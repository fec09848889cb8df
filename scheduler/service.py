"""The loop around the pure engine: events in, commands out, in order (design §3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, assert_never

from observability.metrics import SchedulerMetrics
from scheduler.clock import Clock
from scheduler.commands import Command, DispatchPlan, FinishRequest, PublishReply, UpdateIndex
from scheduler.events import Event, PullReported, StepReported, Tick, WorkerDown, WorkerUp
from scheduler.index_writer import IndexWriter
from scheduler.publisher import Publisher
from scheduler.pull_metrics import observe_hits, observe_pull
from scheduler.stats import EngineStats
from scheduler.terminals import Terminals
from wire.entries import TokensReply

TICK_S: Final = 0.25
MAX_TURN_EVENTS: Final = 256
"""Handled before the loop lets plans and replies go out."""


class EnginePort(Protocol):
    """What the loop needs of scheduler.engine.Engine."""

    def handle(self, event: Event, now: float) -> list[Command]: ...

    def stats(self) -> EngineStats: ...


class Service:
    """Executes what the engine commands. The only caller of handle(), so events are handled one at a time."""

    def __init__(
        self,
        engine: EnginePort,
        inbox: asyncio.Queue[Event],
        clock: Clock,
        *,
        send_plan: Callable[[DispatchPlan], None],
        workers_changed: Callable[[], None],
        publisher: Publisher,
        terminals: Terminals,
        index: IndexWriter,
        metrics: SchedulerMetrics,
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._clock = clock
        self._send_plan = send_plan
        self._workers_changed = workers_changed
        self._publisher = publisher
        self._terminals = terminals
        self._index = index
        self._metrics = metrics
        self._model_name = ""

    async def run(self) -> None:
        """Turn after turn: all waiting events, then one batch of replies."""
        while True:
            self.turn(await self._next_events())
            await self._publisher.wait_for_room()
            await asyncio.sleep(0)  # lets links and the publisher write, however full the inbox is

    def turn(self, events: list[Event]) -> None:
        """Feed the engine and execute its commands: plans at once, then all replies as one batch."""
        replies: list[PublishReply | FinishRequest] = []
        for event in events:
            for command in self._engine.handle(event, self._clock.now()):
                match command:
                    case DispatchPlan():
                        self._dispatch(command)
                    case PublishReply() | FinishRequest():
                        replies.append(command)
                    case UpdateIndex():
                        self._index.update(command)
                    case _:
                        assert_never(command)
            self._observe(event)
        replies.sort(key=_is_not_first)
        for reply in replies:
            match reply:
                case PublishReply(gateway_id, item):
                    self._publisher.publish(gateway_id, item)
                case FinishRequest():
                    self._finish(reply)

    async def tick(self) -> None:
        """Let the engine know, for ever, that time passes."""
        while True:
            await self._inbox.put(Tick())
            await asyncio.sleep(TICK_S)

    async def _next_events(self) -> list[Event]:
        """Everything that waits, at least one event and at most MAX_TURN_EVENTS."""
        events = [await self._inbox.get()]
        while len(events) < MAX_TURN_EVENTS and not self._inbox.empty():
            events.append(self._inbox.get_nowait())
        return events

    def _dispatch(self, command: DispatchPlan) -> None:
        self._send_plan(command)
        self._metrics.plans.labels(command.worker_id).inc()

    def _finish(self, command: FinishRequest) -> None:
        self._terminals.finish(command.terminal, command.timeline)
        stats = command.terminal.stats
        if command.timeline.admissions:
            self._metrics.queue_time_s.labels(self._model_name).observe(stats.queue_s)
            self._metrics.prefix_cache_queries.labels(self._model_name).inc(stats.prompt_tokens)
            self._metrics.prefix_cache_hits.labels(self._model_name).inc(stats.cached_tokens)
            observe_hits(self._metrics, command.timeline)

    def _observe(self, event: Event) -> None:
        match event:
            case StepReported(worker_id, _, report) if report.timing is not None:
                timing = report.timing
                self._metrics.observe_step(
                    worker_id,
                    step_s=timing.step_us * 1e-6,
                    prefill_tokens=timing.prefill_tokens,
                    decode_tokens=timing.decode_tokens,
                )
            case PullReported(_, _, report) if report.done:
                observe_pull(self._metrics, report)
            case WorkerUp(info, _):
                self._model_name = info.model.name
                self._workers_changed()
            case WorkerDown(worker_id, epoch, _):
                self._index.worker_down(worker_id, epoch)
                self._workers_changed()


def _is_not_first(reply: PublishReply | FinishRequest) -> bool:
    """Sorts a choice's first tokens, which are waited for longest, before all else; what belongs to one choice stays in
    order."""
    match reply:
        case PublishReply(item=TokensReply(position=0)):
            return False
    return True
