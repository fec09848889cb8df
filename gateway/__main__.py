"""`python -m gateway`: serve until SIGTERM or SIGINT, then drain; a second signal stops at once."""

from __future__ import annotations

import asyncio
import os
import sys

import uvloop

from gateway.lifetime import drain, serve
from observability.logs import setup_logging
from observability.tracing import Tracer, setup_tracing
from wire.config import GatewayConfig, load
from wire.errors import ConfigInvalid, ModelUnsupported
from wire.stop_signals import stop_signals


async def run(config: GatewayConfig, tracer: Tracer) -> None:
    """Serve until a signal says otherwise."""
    signals = stop_signals()
    async with serve(config, tracer) as (parts, _):
        await signals.stop.wait()
        await drain(parts, config.drain_s, signals.hurry)


def main() -> int:
    """Exit status: 0 after a drain, 1 when the port is taken, 2 for a configuration that cannot work."""
    try:
        config = load(GatewayConfig, os.environ)
        setup_logging("gateway", config.cell.log_level)
        tracer = setup_tracing("gateway", os.environ)
    except (ConfigInvalid, ValueError) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(config, tracer))
    except (ConfigInvalid, ModelUnsupported) as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"gateway: cannot serve on {config.host}:{config.port}: {error}", file=sys.stderr)
        return 1
    finally:
        tracer.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
