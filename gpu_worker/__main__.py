"""`python -m gpu_worker`: load the model, serve plans, be found through Redis, stop cleanly on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import time
from contextlib import AsyncExitStack

import uvloop
from redis.asyncio import Redis

from gpu_worker.executor import Executor
from gpu_worker.model_port import ModelRunner
from gpu_worker.registration import keep_registered
from gpu_worker.server import WorkerService, bind_server, serving
from gpu_worker.server.session import WorkerIdentity
from gpu_worker.simulated_pulls import SimulatedPuller
from gpu_worker.simulated_runner import open_simulated
from gpu_worker.step_cost import PullCost, StepCost
from gpu_worker.telemetry import StepTelemetry
from gpu_worker.tiers.open_tiers import open_tiers
from gpu_worker.transfer.plane import open_plane
from gpu_worker.transfer.port import Puller
from gpu_worker.transfer.transports import GRPC, TRANSPORTS
from kvstore.prefix_hash import namespace
from observability.health_server import serve_health
from observability.logs import setup_logging
from observability.metrics import WorkerMetrics
from observability.tracing import Tracer, setup_tracing
from wire.collector import calm_collector
from wire.config import CellConfig, WorkerConfig, load
from wire.entries import WorkerEntry
from wire.errors import MeshError
from wire.ids import Epoch, WorkerId
from wire.model_path import cache_root, model_path, served_name
from wire.plan import Role, SharedTier
from wire.redis_client import open_redis
from wire.stop_signals import stop_signals

log = logging.getLogger("gpu_worker")

REDIS_TIMEOUT_S = 2.0
"""A heartbeat that takes longer has failed."""


def identify(config: WorkerConfig, bound_port: int, shared_tier: SharedTier | None) -> WorkerIdentity:
    """Who this worker is and where others reach it; a wildcard address is advertised as the host's name."""
    host = socket.gethostname() if config.host in ("", "0.0.0.0", "::") else config.host
    return WorkerIdentity(
        worker_id=WorkerId(config.worker_id or f"{socket.gethostname()}-{bound_port}"),
        advertise_address=config.advertise_address or f"{host}:{bound_port}",
        role=Role(config.role),
        min_prompt_tokens=config.min_prompt_tokens,
        max_prompt_tokens=config.max_prompt_tokens,
        shared_tier=shared_tier,
    )


def load_model(config: WorkerConfig) -> ModelRunner:
    """The model, or what stands in for it. torch is imported here, and only for a real one."""
    if config.simulation.simulate:
        return simulated_model(config)
    from gpu_worker.model_runner import load_runner

    return load_runner(
        model_path(config.model),
        device=config.device,
        weight_dtype=config.weight_dtype,
        activation_dtype=config.activation_dtype,
        kv_dtype=config.kv_dtype,
        cuda_graphs=config.cuda_graphs == "auto",
        attention_backend=config.attention_backend,
        kernels_dir=cache_root(config.model) if config.cpu_kernels == "auto" else None,
        page_size=config.page_size,
        num_pages=config.num_pages,
        kv_memory_bytes=config.kv_memory_mb << 20,
        max_model_len=config.model.max_model_len,
        name=served_name(config.model),
        threads=config.threads,
    )


def simulated_model(config: WorkerConfig) -> ModelRunner:
    simulation = config.simulation
    return open_simulated(
        model_path(config.model),
        StepCost(
            fixed_us=simulation.fixed_us,
            weights_us=simulation.weights_us,
            context_token_us=simulation.context_token_us,
            prefill_token_us=simulation.prefill_token_us,
            decode_token_us=simulation.decode_token_us,
        ),
        page_size=config.page_size,
        num_pages=config.num_pages,
        kv_memory_bytes=config.kv_memory_mb << 20,
        max_model_len=config.model.max_model_len,
        name=served_name(config.model),
    )


def choose_puller(config: WorkerConfig, puller: Puller | None) -> Puller | None:
    """The one given, slowed down to what a model's KV would take where there is no model."""
    simulation = config.simulation
    if puller is None or not simulation.simulate:
        return puller
    return SimulatedPuller(puller, PullCost(fixed_us=simulation.pull_fixed_us, unit_us=simulation.pull_unit_us))


def connect_redis(config: CellConfig) -> Redis:
    return open_redis(
        config.redis_url,
        cell=config.cell,
        command_timeout_s=REDIS_TIMEOUT_S,
        connect_timeout_s=REDIS_TIMEOUT_S,
    )


async def run_worker(config: WorkerConfig, tracer: Tracer) -> None:
    """Serve until a stop signal; then leave Redis, end the session, finish the running step."""
    metrics = WorkerMetrics()
    not_ready: str | None = "the model is loading"
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(
            serve_health(config.health_host, config.health_port, ready=lambda: not_ready, registry=metrics.registry)
        )
        server, port = bind_server(config.host, config.port)
        redis = await stack.enter_async_context(connect_redis(config.cell))
        runner = await asyncio.to_thread(load_model, config)
        signals = stop_signals()  # not before: a signal while the model loads just ends the process
        # Milliseconds since 1970 at start: a restarted worker's epochs are above all it ever had.
        epoch = Epoch(time.time_ns() // 1_000_000)
        telemetry = StepTelemetry(metrics, tracer)
        units = namespace(runner.card)
        tiers = stack.enter_context(
            open_tiers(config.tiers, config.cell, runner.kv, namespace=units, metrics=metrics.tiers)
        )
        identity = identify(config, port, None if tiers is None else tiers.shared)
        only = (GRPC,) if config.kv_transport == GRPC else TRANSPORTS
        plane = stack.enter_context(
            open_plane(runner.kv, worker_id=identity.worker_id, namespace=units, tiers=tiers, only=only)
        )
        puller = choose_puller(config, plane.puller)
        executor = await stack.enter_async_context(Executor(runner, telemetry, epoch=epoch, puller=puller, tiers=tiers))
        source = await stack.enter_async_context(plane.source(executor))
        await stack.enter_async_context(serving(server, WorkerService(executor, identity, tracer), source))

        def current_entry() -> WorkerEntry:
            return WorkerEntry(
                identity.worker_id, identity.advertise_address, executor.epoch, os.getpid(), identity.role
            )

        calm_collector()
        async with asyncio.TaskGroup() as tasks:
            registration = tasks.create_task(
                keep_registered(redis, config.cell.cell, current_entry, reconnects=metrics.redis_reconnects)
            )
            not_ready = None
            log.info(
                "ready",
                extra={"worker": identity.worker_id, "address": identity.advertise_address, "pages": runner.num_pages},
            )
            await signals.stop.wait()
            not_ready = "the worker is stopping"
            registration.cancel()
    log.info("stopped")


def main() -> int:
    try:
        config = load(WorkerConfig, os.environ)
        setup_logging("gpu_worker", config.cell.log_level)
        tracer = setup_tracing("gpu_worker", os.environ)
    except (MeshError, ValueError) as error:
        print(f"gpu_worker: {error}", file=sys.stderr)
        return 2
    try:
        uvloop.run(run_worker(config, tracer))
    except (MeshError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    except KeyboardInterrupt:  # while the model was loading
        return 130
    finally:
        tracer.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
