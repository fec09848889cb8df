"""The one place where a worker's errors become gRPC statuses."""

from __future__ import annotations

import grpc

from wire.errors import EntryMalformed, FenceLost, MeshError, Overloaded, TransferFailed, TransferRefused, Unavailable

_STATUS: tuple[tuple[type[MeshError], grpc.StatusCode], ...] = (
    (FenceLost, grpc.StatusCode.FAILED_PRECONDITION),
    (TransferRefused, grpc.StatusCode.FAILED_PRECONDITION),
    (TransferFailed, grpc.StatusCode.ABORTED),
    (EntryMalformed, grpc.StatusCode.INVALID_ARGUMENT),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
)


def status_of(error: MeshError) -> grpc.StatusCode:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
