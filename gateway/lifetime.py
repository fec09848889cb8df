"""Start and stop of a gateway: its parts, their tasks, its HTTP server, and the drain between."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web

from gateway.api.body import BodyReader
from gateway.app import build_app
from gateway.auth import ApiKeys
from gateway.cell import CellWatch
from gateway.http_log import quiet_server_log
from gateway.mesh import Mesh
from gateway.parts import Parts, TextSide
from gateway.redis_link import REDIS_ERRORS, open_redis
from gateway.replies import ReplyReader
from gateway.running import Running
from gateway.text.chat_template import load_chat_template
from gateway.text.tokenizer import load_tokenizer
from gateway.text.tokenizer_pool import TokenizerPool
from observability.loop_lag import watch_loop_lag
from observability.metrics import GatewayMetrics
from observability.tracing import Tracer
from wire.config import GatewayConfig
from wire.errors import Unavailable
from wire.ids import GatewayId
from wire.model_path import model_path, served_name

log = logging.getLogger("gateway")

GOODBYE_S = 1.0
"""How long a stopping gateway tries to send its last cancels, and lets its last answers out."""
LINGER_S = 5.0
"""How long the rest of a refused body is read and thrown away, so that the client gets to read its answer."""
IDLE_S = 75.0
"""How long a connection may stay without a complete request header; longer than the proxies before us keep theirs
(nginx and AWS's balancers 60 s), for they must be the ones that hang up."""
BACKLOG = 1024
"""Connections of a burst that wait to be accepted; of those beyond, Linux drops the first packet, which costs 1 s."""


@asynccontextmanager
async def open_parts(config: GatewayConfig, gateway_id: GatewayId, tracer: Tracer) -> AsyncIterator[Parts]:
    """The gateway's parts with their tasks running. Raises ConfigInvalid, ModelUnsupported."""
    model_dir = model_path(config.model)
    model_name = served_name(config.model)
    tokenizer = load_tokenizer(model_dir)
    template = load_chat_template(model_dir, tokenizer.special_tokens)
    metrics = GatewayMetrics()
    url = config.cell.redis_url
    async with (
        TokenizerPool(tokenizer, model_dir, config.tokenizer_processes) as pool,
        open_redis(url, cell=config.cell.cell) as redis,
        open_redis(url, cell=config.cell.cell) as submit_redis,
        open_redis(url, cell=config.cell.cell) as blocking_redis,
        asyncio.TaskGroup() as tasks,
    ):
        mesh = Mesh(redis, submit_redis, config.cell.cell, config.max_live_requests, metrics)
        parts = Parts(
            gateway_id=gateway_id,
            model_name=model_name,
            default_max_tokens=config.default_max_tokens,
            started_unix_s=time.time(),
            text=TextSide(tokenizer, pool, template),
            mesh=mesh,
            replies=ReplyReader(blocking_redis, config.cell.cell, gateway_id, mesh, metrics),
            cell=CellWatch(redis, config.cell.cell, gateway_id, model_name, config.mesh_grace_s),
            keys=ApiKeys(config.api_keys),
            bodies=BodyReader(config.max_body_mb * 2**20),
            running=Running(),
            metrics=metrics,
            tracer=tracer,
        )
        await parts.cell.look()
        with suppress(*REDIS_ERRORS):  # without Redis the gateway starts as well, and says 503
            await parts.replies.attach()
        owned = [
            tasks.create_task(parts.replies.run(), name="replies"),
            tasks.create_task(parts.cell.run(parts.replies.fail_all), name="cell"),
            tasks.create_task(mesh.send_submits(), name="submits"),
            tasks.create_task(mesh.send_cancels(), name="cancels"),
            tasks.create_task(watch_loop_lag(metrics.event_loop_lag_s), name="lag"),
        ]
        try:
            yield parts
        finally:
            for task in owned:
                task.cancel()
            await _say_goodbye(parts)


@asynccontextmanager
async def serve(config: GatewayConfig, tracer: Tracer) -> AsyncIterator[tuple[Parts, int]]:
    """A gateway that answers HTTP; yields its parts and the port it bound. Leaving does not drain: see `drain`.

    Raises ConfigInvalid, ModelUnsupported, and OSError when the port is taken.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.create_server((config.host, config.port), family=family)
    port: int = listener.getsockname()[1]
    gateway_id = GatewayId(config.gateway_id or f"{socket.gethostname()}:{port}")
    with listener:
        async with open_parts(config, gateway_id, tracer) as parts:
            debug = config.cell.log_level == "debug"
            runner = web.AppRunner(
                build_app(parts, max_body_bytes=config.max_body_mb * 2**20),
                handler_cancellation=True,  # a client that leaves cancels its handler, and that the mesh's work
                access_log=logging.getLogger("gateway.access") if debug else None,
                logger=quiet_server_log(),
                keepalive_timeout=IDLE_S,
                lingering_time=LINGER_S,
                shutdown_timeout=GOODBYE_S,
            )
            await runner.setup()
            try:
                await web.SockSite(runner, listener, backlog=BACKLOG).start()
                log.info("%s serves %r on http://%s:%d", gateway_id, parts.model_name, config.host, port)
                yield parts, port
            finally:
                await runner.cleanup()


async def drain(parts: Parts, drain_s: float, hurry: asyncio.Event) -> None:
    """Answer 503 to new requests while running ones finish; end those that have not after drain_s, or at `hurry`."""
    log.info("draining for up to %.0f s", drain_s)
    async with asyncio.TaskGroup() as tasks:
        finished = tasks.create_task(parts.running.drain())
        hurried = tasks.create_task(hurry.wait())
        await asyncio.wait((finished, hurried), timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not finished.done():
            parts.replies.fail_all(Unavailable("this gateway is stopping"))
            await asyncio.wait((finished,), timeout=GOODBYE_S)
            finished.cancel()


async def _say_goodbye(parts: Parts) -> None:
    """Cancel in the mesh what was cut off here, and give up the lease."""
    try:
        async with asyncio.timeout(GOODBYE_S):
            await parts.mesh.flush_cancels()
            await parts.cell.leave()
    except (*REDIS_ERRORS, TimeoutError) as error:
        log.warning("left without a word: %s", error)
