"""The one edge where errors become HTTP: every answer that is not 2xx is `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
import math
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from wire.errors import InvalidRequest, MeshError, Overloaded, RequestTooLarge, Unavailable

log = logging.getLogger("gateway.http")

ERROR_CODE = web.RequestKey("error_code", str)
"""Set on a request that was answered with an error, also in mid-stream."""
CLIENT_LEFT = web.RequestKey("client_left", bool)
"""Set on a request whose client did not wait for its answer, whatever the status that was on its way."""


class RouteNotFound(InvalidRequest):
    code = "not_found"
    http_status = 404


class MethodNotAllowed(InvalidRequest):
    code = "method_not_allowed"
    http_status = 405


class BodyTooSlow(InvalidRequest):
    code = "request_timeout"
    http_status = 408


class UnsupportedMediaType(InvalidRequest):
    code = "unsupported_media_type"
    http_status = 415


class ExpectationFailed(InvalidRequest):
    code = "expectation_failed"
    http_status = 417


def error_body(error: MeshError) -> dict[str, Any]:
    """The OpenAI-shaped object, for a response or for an event in mid-stream."""
    return {
        "error": {
            "message": error.message,
            "type": error.openai_type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: MeshError) -> web.Response:
    response = web.json_response(error_body(error), status=error.http_status)
    if isinstance(error, (Overloaded, Unavailable)):
        response.headers[hdrs.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if isinstance(error, BodyTooSlow):
        response.force_close()
    return response


def as_mesh_error(error: Exception, request: web.Request) -> MeshError:
    """What a client may know of any exception. One that nobody foresaw is logged and shown as "internal error"."""
    match error:
        case MeshError():
            return error
        case web.HTTPNotFound():
            return RouteNotFound(f"there is no {request.method} {request.path}")
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowed(f"{request.path} takes {', '.join(sorted(error.allowed_methods))}")
        case web.HTTPRequestEntityTooLarge():
            return RequestTooLarge("the body is too large")
        case web.HTTPExpectationFailed():
            return ExpectationFailed("only `Expect: 100-continue` is understood")
        case web.RequestPayloadError():
            return InvalidRequest("the body ended early or is not encoded as its headers say")
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return MeshError("internal error")


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what a handler raises into a response. Cancellation is not an error and passes through."""
    try:
        return await handler(request)
    except Exception as error:
        known = as_mesh_error(error, request)
        request[ERROR_CODE] = known.code
        response = error_response(known)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers[hdrs.ALLOW] = error.headers[hdrs.ALLOW]
        return response
