"""From a request's stream entry to the engine's RequestArrived.

The root of a prompt's hash chain needs the model card, which only a worker knows. Requests that come before the
first worker are held, unacknowledged, for no_worker_grace_s; afterwards the engine itself deals with having none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

from kvstore.prefix_hash import namespace, root_hash
from scheduler.clock import Clock
from scheduler.events import ChoiceProgress, Event, Request, RequestArrived
from scheduler.pending import PendingRequest, PendingRequests
from scheduler.request_spans import RequestSpans
from scheduler.terminals import Terminals
from wire.entries import RequestEntry
from wire.errors import InvalidRequest, Unavailable
from wire.plan import ModelCard
from wire.worker_codec import encode_sampling

log = logging.getLogger(__name__)

CHECK_S: Final = 0.25
RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Held:
    entry: RequestEntry
    progress: tuple[ChoiceProgress, ...]
    traceparent: str
    deadline_s: float


class Arrivals:
    def __init__(
        self,
        inbox: asyncio.Queue[Event],
        pending: PendingRequests,
        terminals: Terminals,
        spans: RequestSpans,
        clock: Clock,
        *,
        no_worker_grace_s: float,
    ) -> None:
        self._inbox = inbox
        self._pending = pending
        self._terminals = terminals
        self._spans = spans
        self._clock = clock
        self._grace_s = no_worker_grace_s
        self._namespace: str | None = None
        self._vocab_size = 0
        # Bounded by the gateways' admission counter.
        self._held: deque[_Held] = deque()

    async def accept(self, request: PendingRequest, progress: tuple[ChoiceProgress, ...] = ()) -> None:
        """Take a request, new or read again; progress is what an earlier scheduler published of it."""
        earlier = self._pending.add(request)
        if earlier is not None:
            self._terminals.drop_repeat(earlier, request)
            return
        now = self._clock.now()
        entry = request.entry
        held = _Held(entry, progress, self._spans.open(entry, now), now + self._grace_s)
        if self._namespace is None:
            self._held.append(held)
        else:
            await self._hand_on(held)

    async def model_known(self, card: ModelCard) -> None:
        """A worker is up: let in what was held."""
        self._namespace, self._vocab_size = namespace(card), card.vocab_size
        while self._held:
            await self._hand_on(self._held.popleft())

    async def expire(self) -> None:
        """End held requests whose grace is over, for ever."""
        while True:
            while self._held and self._held[0].deadline_s <= self._clock.now():
                error = Unavailable("no worker has come up yet", retry_after_s=RETRY_AFTER_S)
                self._terminals.fail(self._held.popleft().entry.request_id, error)
            await asyncio.sleep(CHECK_S)

    async def _hand_on(self, held: _Held) -> None:
        entry = held.entry
        if problem := self._problem(entry):
            log.warning("request refused: %s", problem, extra={"request_id": entry.request_id})
            self._terminals.fail(entry.request_id, InvalidRequest(problem))
            return
        assert self._namespace is not None
        request = Request(
            request_id=entry.request_id,
            gateway_id=entry.gateway_id,
            prompt=entry.prompt,
            sampling=entry.sampling,
            root_hash=root_hash(self._namespace, entry.salt),
            num_choices=entry.num_choices,
            tenant=entry.tenant,
            priority=entry.priority,
            deadline_s=entry.deadline_unix_s,
            traceparent=held.traceparent,
        )
        await self._inbox.put(RequestArrived(request, held.progress))

    def _problem(self, entry: RequestEntry) -> str | None:
        """Why an entry must not reach a worker, where it would fail a whole step; gateways check the same first."""
        if not entry.prompt:
            return "prompt: empty"
        if max(entry.prompt) >= self._vocab_size:
            return f"prompt: token id {max(entry.prompt)} is not in the vocabulary of {self._vocab_size}"
        if entry.num_choices < 1 or entry.sampling.max_tokens < 1:
            return "n and max_tokens must be at least 1"
        try:
            encode_sampling(entry.sampling)
        except (TypeError, ValueError) as error:
            return f"sampling: {error}"
        return None
