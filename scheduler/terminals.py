"""The one way a request ends outside the engine as well as inside: terminal, journal, stream entry, spans."""

from __future__ import annotations

import logging

from scheduler.commands import Timeline
from scheduler.pending import PendingRequest, PendingRequests
from scheduler.publisher import Publisher
from scheduler.request_spans import RequestSpans
from wire.entries import TerminalReply
from wire.errors import MeshError
from wire.ids import RequestId

log = logging.getLogger(__name__)


class Terminals:
    def __init__(self, pending: PendingRequests, publisher: Publisher, spans: RequestSpans) -> None:
        self._pending = pending
        self._publisher = publisher
        self._spans = spans

    def finish(self, terminal: TerminalReply, timeline: Timeline | None = None) -> None:
        """End a pending request. Without a timeline the engine never saw it."""
        request = self._pending.remove(terminal.request_id)
        if request is None:
            log.error("terminal of a request that is not pending", extra={"request_id": terminal.request_id})
            return
        self._publisher.finish(request.entry.gateway_id, request.lane, request.entry_id, terminal)
        self._spans.finish(terminal, timeline)

    def drop_repeat(self, earlier: PendingRequest, later: PendingRequest) -> None:
        """Two entries of one request: only the later one is closed with it."""
        if earlier.entry_id != later.entry_id:
            self._publisher.discard(earlier.lane, earlier.entry_id)

    def fail(self, request_id: RequestId, error: MeshError) -> None:
        """End a request that never reached the engine."""
        self.finish(
            TerminalReply(
                request_id, error_code=error.code, error_message=error.message, retry_after_s=error.retry_after_s
            )
        )
