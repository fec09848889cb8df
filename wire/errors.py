"""The error tree. Every error that can reach a client has a stable code, a message that names the field and
the limit, and is turned into HTTP at one edge (gateway/errors.py) and into gRPC at one (gpu_worker/grpc_status.py)."""

from __future__ import annotations

from typing import ClassVar


class MeshError(Exception):
    """Base of every error the mesh raises on purpose. `code` is stable and part of the API."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    openai_type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class ConfigInvalid(MeshError):
    """A variable or option is malformed or unknown; found at start."""

    code = "config_invalid"


class ModelUnsupported(MeshError):
    """An architecture or a config field that would change the result is not implemented."""

    code = "model_unsupported"


class InvalidRequest(MeshError):
    code = "invalid_request"
    http_status = 400
    openai_type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class RequestTooLarge(InvalidRequest):
    code = "request_too_large"
    http_status = 413


class ModelNotFound(InvalidRequest):
    code = "model_not_found"
    http_status = 404


class Unauthorized(InvalidRequest):
    code = "invalid_api_key"
    http_status = 401
    openai_type = "authentication_error"


class Overloaded(MeshError):
    """The bounded queue is full; carries Retry-After."""

    code = "overloaded"
    http_status = 429
    openai_type = "rate_limit_error"


class Unavailable(MeshError):
    """No worker, draining, or Redis is away."""

    code = "unavailable"
    http_status = 503


class WorkerLost(Unavailable):
    """The sequence's worker died and no other came within no_worker_grace_s."""

    code = "worker_lost"


class KVCapacityExceeded(InvalidRequest):
    """prompt + max_tokens can never fit the usable KV pool."""

    code = "kv_capacity"


class StepFailed(MeshError):
    """A worker's step raised; what it computed is void."""

    code = "step_failed"


class TransferRefused(MeshError):
    """A pull asks for KV of another epoch, namespace or format than the source's, or of a worker that gives none."""

    code = "transfer_refused"


class TransferFailed(MeshError):
    """A pull under way cannot go on: a page got a new owner, a checksum is wrong, the source is silent or gone."""

    code = "transfer_failed"


class EntryMalformed(MeshError):
    """A Redis stream entry or a gRPC message is not of a version or shape we read."""

    code = "entry_malformed"


class FenceLost(MeshError):
    """Another scheduler holds a higher fence; this one must stop acting."""

    code = "fence_lost"


class KVPoolExhausted(MeshError):
    """The page pool has neither a free nor an evictable page. Callers check room first; this is a bug guard."""

    code = "kv_pool_exhausted"


def _all_errors(cls: type[MeshError]) -> dict[str, type[MeshError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_all_errors(sub))
    return found


def error_from_code(code: str, message: str, *, retry_after_s: float | None = None) -> MeshError:
    """Rebuild an error that crossed a process boundary; an unknown code becomes a plain MeshError."""
    return _all_errors(MeshError).get(code, MeshError)(message, retry_after_s=retry_after_s)
