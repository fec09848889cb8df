"""The HTTP application: routes and middlewares over the gateway's parts."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.typedefs import Handler

from gateway.api import generate, models
from gateway.errors import CLIENT_LEFT, ERROR_CODE, error_middleware
from gateway.parts import PARTS, Parts
from gateway.telemetry import CLIENT_LEFT_STATUS
from observability.health_server import health_routes


@web.middleware
async def count_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Counts every request by route and status, and errors by code."""
    metrics = request.app[PARTS].metrics
    resource = request.match_info.route.resource
    route = resource.canonical if resource is not None else "unknown"
    try:
        response = await handler(request)
    except asyncio.CancelledError:
        metrics.requests.labels(route, str(CLIENT_LEFT_STATUS)).inc()
        raise
    status = CLIENT_LEFT_STATUS if CLIENT_LEFT in request else response.status
    metrics.requests.labels(route, str(status)).inc()
    if ERROR_CODE in request:
        metrics.rejections.labels(request[ERROR_CODE]).inc()
    return response


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Every answer of the generation endpoints, streams and errors too, names its request."""
    if generate.REQUEST_ID in request:
        response.headers[generate.REQUEST_ID_HEADER] = request[generate.REQUEST_ID]


def build_app(parts: Parts, *, max_body_bytes: int) -> web.Application:
    """The application; the parts must be running while it serves."""
    app = web.Application(middlewares=[count_middleware, error_middleware], client_max_size=max_body_bytes)
    app[PARTS] = parts
    app.router.add_get("/", models.landing)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{model:.+}", models.get_model)
    expect = parts.bodies.expect_continue
    app.router.add_post("/v1/completions", generate.completions, expect_handler=expect)
    app.router.add_post("/v1/chat/completions", generate.chat_completions, expect_handler=expect)
    app.add_routes(health_routes(parts.not_ready, parts.metrics.registry))
    app.on_response_prepare.append(add_request_id)
    return app
