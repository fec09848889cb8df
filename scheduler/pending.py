"""The requests that are ours to end: delivered entries of the request lanes, not yet acknowledged."""

from __future__ import annotations

from dataclasses import dataclass

from wire.entries import RequestEntry
from wire.ids import GatewayId, RequestId


@dataclass(slots=True)
class PendingRequest:
    entry: RequestEntry
    lane: str
    entry_id: bytes
    """Of its entry in the lane's stream."""


class PendingRequests:
    """By request id, and by the gateway that waits for it.

    An entry can come twice: read again after a broken connection, or added again by a gateway whose Redis lost it.
    """

    def __init__(self) -> None:
        self._by_id: dict[RequestId, PendingRequest] = {}
        self._by_gateway: dict[GatewayId, set[RequestId]] = {}

    def add(self, request: PendingRequest) -> PendingRequest | None:
        """None for a new request; else the one known by its id until now, whose place this one takes."""
        request_id = request.entry.request_id
        known = self._by_id.get(request_id)
        self._by_id[request_id] = request
        self._by_gateway.setdefault(request.entry.gateway_id, set()).add(request_id)
        return known

    def remove(self, request_id: RequestId) -> PendingRequest | None:
        """None when it is unknown."""
        request = self._by_id.pop(request_id, None)
        if request is not None:
            of_gateway = self._by_gateway[request.entry.gateway_id]
            of_gateway.discard(request_id)
            if not of_gateway:
                del self._by_gateway[request.entry.gateway_id]
        return request

    def all(self) -> list[PendingRequest]:
        return list(self._by_id.values())

    def gateways(self) -> list[GatewayId]:
        return list(self._by_gateway)

    def of_gateway(self, gateway_id: GatewayId) -> list[RequestId]:
        return list(self._by_gateway.get(gateway_id, ()))
