"""The engine's memory of requests: those without a terminal, and for a while those that ended. Pure.

Remembering the ended ones makes repeats harmless: a request that is handed in again after its end gets its terminal
again, and a cancel that overtook its request still finds it.
"""

from __future__ import annotations

from collections import OrderedDict

from scheduler.commands import FinishRequest
from scheduler.sequence import LiveRequest
from wire.ids import RequestId

REMEMBERED = 8192
"""Ended requests, and early cancels, that are remembered."""


class RequestBook:
    def __init__(self) -> None:
        self.live: dict[RequestId, LiveRequest] = {}
        self._ended: OrderedDict[RequestId, FinishRequest] = OrderedDict()
        self._early_cancels: OrderedDict[RequestId, None] = OrderedDict()
        self._num_arrived = 0

    def next_order(self) -> int:
        """Arrival number of the next request."""
        self._num_arrived += 1
        return self._num_arrived

    def end(self, finish: FinishRequest) -> None:
        self.live.pop(finish.request_id, None)
        self._ended[finish.request_id] = finish
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def ended(self, request_id: RequestId) -> FinishRequest | None:
        return self._ended.get(request_id)

    def cancel_early(self, request_id: RequestId) -> None:
        """A cancel of a request we have not seen, or have seen end."""
        if request_id in self._ended:
            return
        self._early_cancels[request_id] = None
        if len(self._early_cancels) > REMEMBERED:
            self._early_cancels.popitem(last=False)

    def was_cancelled(self, request_id: RequestId) -> bool:
        """Whether a cancel came before the request; forgets it."""
        return self._early_cancels.pop(request_id, 0) is None
