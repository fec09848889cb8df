"""/v1/models, and the page at `/`."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from gateway.api.generate import check_model
from gateway.parts import PARTS, Parts


async def list_models(request: web.Request) -> web.Response:
    parts = request.app[PARTS]
    parts.keys.tenant_of(request)
    return web.json_response({"object": "list", "data": [_model(parts)]})


async def get_model(request: web.Request) -> web.Response:
    parts = request.app[PARTS]
    parts.keys.tenant_of(request)
    check_model(request.match_info["model"], parts)
    return web.json_response(_model(parts))


async def landing(request: web.Request) -> web.Response:
    """What this is and where to go, for who opens the address in a browser."""
    parts = request.app[PARTS]
    links = ["/v1/models", "/v1/completions", "/v1/chat/completions", "/health", "/live", "/metrics"]
    return web.json_response({"name": "phasemesh gateway", "model": parts.model_name, "endpoints": links})


def _model(parts: Parts) -> dict[str, Any]:
    card = parts.cell.card
    return {
        "id": parts.model_name,
        "object": "model",
        "created": int(parts.started_unix_s),
        "owned_by": "phasemesh",
        "max_model_len": (card.max_model_len or None) if card else None,
    }
