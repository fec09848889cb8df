"""/live, /health and /metrics: what container platforms, load balancers and Prometheus ask of a process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

_SHUTDOWN_S = 1.0
"""Scrapes still running when the server closes get this long."""


def health_routes(ready: Callable[[], str | None], registry: CollectorRegistry) -> list[web.RouteDef]:
    """The three routes, for a service that has an HTTP server of its own.

    /live: 200 as long as the event loop turns. /health: 200 when `ready()` is None, else 503 with the reason.
    /metrics: the registry in Prometheus's or OpenMetrics' text format, as the scraper accepts.
    """

    async def live(_: web.Request) -> web.Response:
        return web.json_response({"status": "live"})

    async def health(_: web.Request) -> web.Response:
        reason = ready()
        if reason is None:
            return web.json_response({"status": "ready"})
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(registry), headers={hdrs.CONTENT_TYPE: content_type})

    return [web.get("/live", live), web.get("/health", health), web.get("/metrics", metrics)]


@asynccontextmanager
async def serve_health(
    host: str, port: int, *, ready: Callable[[], str | None], registry: CollectorRegistry
) -> AsyncIterator[int]:
    """Serve health_routes on a port of their own; yields the bound one. Raises OSError when it is taken."""
    app = web.Application()
    app.add_routes(health_routes(ready, registry))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
