"""`phasemesh up` and `phasemesh down`."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
from collections.abc import Mapping

from phasemesh.cli.options import Subparsers, add_command, add_option
from phasemesh.state import StateDir, wait_for_exit
from wire.config import (
    BatchingConfig,
    CellConfig,
    GatewayConfig,
    LauncherConfig,
    ModelConfig,
    SimulationConfig,
    WorkerConfig,
    load,
)

DOWN_TIMEOUT_S = 60.0

UP = """\
Starts Redis (one on PATH, else the bundled one), the scheduler, the workers and the gateway; waits until each is
ready; asks the model one question; then keeps them running until Ctrl-C, which lets running requests finish.
The default model is fetched on first use. A service that dies is restarted.

examples:
  phasemesh up                                      the default model at http://127.0.0.1:8000/v1
  phasemesh up --model ~/models/Qwen3-0.6B          a Hugging Face directory of the Llama family
  phasemesh up --workers 2 --port 9000              two workers, which share the cores
  phasemesh up --workers 3 --roles prefill,decode,decode    prompts and outputs apart (docs/disaggregation.md)
  phasemesh up --state-dir /tmp/two --port 8001     a second stack beside the first
  phasemesh up --simulate                           no model is run: the mesh itself, with made-up tokens
  PHASEMESH_KV_PAGES=512 phasemesh up               anything else: the variables in README.md
"""

DOWN = """\
Stops the stack that `phasemesh up` runs in a state directory, as Ctrl-C does, and waits until it has ended.

examples:
  phasemesh down
  phasemesh down --state-dir /tmp/two
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "up", run_up, "Run the whole mesh on this machine.", UP)
    add_option(parser, "--model", ModelConfig, "model", "DIR|NAME")
    add_option(parser, "--workers", LauncherConfig, "workers", "N")
    add_option(parser, "--roles", LauncherConfig, "roles", "R,R,…")
    add_option(parser, "--port", GatewayConfig, "port", "P")
    add_option(parser, "--redis-url", CellConfig, "redis_url", "U")
    add_option(parser, "--state-dir", LauncherConfig, "state_dir", "D")
    add_option(parser, "--weight-dtype", WorkerConfig, "weight_dtype", "TYPE")
    add_option(parser, "--activation-dtype", WorkerConfig, "activation_dtype", "TYPE")
    add_option(parser, "--simulate", SimulationConfig, "simulate", "on|off")
    add_option(parser, "--itl-target-ms", BatchingConfig, "itl_target_ms", "MS")
    down = add_command(subparsers, "down", run_down, "Stop the running stack.", DOWN)
    add_option(down, "--state-dir", LauncherConfig, "state_dir", "D")


def run_up(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from phasemesh.up import up

    up(load(LauncherConfig, environ), environ, say)
    return 0


def say(text: str) -> None:
    """Print at once; a terminal that went away is no reason to stop."""
    with contextlib.suppress(OSError):
        print(text, flush=True)


def run_down(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    state = StateDir.of(load(LauncherConfig, environ))
    stack = state.running()
    if stack is None:
        print(f"no stack runs in {state.path}")
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(stack.pid, signal.SIGTERM)
    if not wait_for_exit(stack.pid, DOWN_TIMEOUT_S):
        print(f"pid {stack.pid} still drains after {DOWN_TIMEOUT_S:g} s; `phasemesh down` again ends it at once")
        return 1
    print(f"stopped the stack in {state.path}")
    return 0
