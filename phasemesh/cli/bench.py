"""`phasemesh bench`: load a server and say how it did."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from phasemesh.cli.options import Subparsers, add_command, add_option
from phasemesh.state import local_url
from wire.api_keys import first_api_key
from wire.config import BenchConfig, ClientConfig, LauncherConfig, load
from wire.errors import ConfigInvalid

BENCH = """\
Loads the stack of the state directory, or any OpenAI-compatible server at --url (its root, or the URL of its
/v1/completions or /v1/chat/completions), open loop (--rate) or closed loop (--concurrency). Prints TTFT, ITL, TPOT and
E2E percentiles, tokens/s, goodput and prefix hits. docs/benchmarking.md says what each figure means.
Exit status 0 when at least one request to each server came through, 1 when not.

examples:
  phasemesh bench --workload chat --rate 2
  phasemesh bench --workload rag --concurrency 4 --requests 40 --slo-ttft-ms 2000 --slo-itl-ms 100
  phasemesh bench --workload trace.jsonl --json report.json
  phasemesh bench --concurrency 1 --url http://127.0.0.1:8000 --compare http://127.0.0.1:8080
"""
JSON = "PHASEMESH_BENCH_JSON"


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "bench", run, "Load a server and measure it.", BENCH)
    add_option(parser, "--url", ClientConfig, "url", "URL")
    add_option(parser, "--api-key", ClientConfig, "api_key", "KEY")
    add_option(parser, "--state-dir", LauncherConfig, "state_dir", "D")
    for flag, field, metavar in (
        ("--workload", "workload", "chat|rag|reasoning|agent|FILE.jsonl"),
        ("--rate", "rate", "R"),
        ("--concurrency", "concurrency", "C"),
        ("--requests", "requests", "N"),
        ("--warm-up", "warm_up", "N"),
        ("--model", "model", "M"),
        ("--seed", "seed", "S"),
        ("--scale", "scale", "X"),
        ("--ignore-eos", "ignore_eos", "on|off"),
        ("--slo-ttft-ms", "slo_ttft_ms", "MS"),
        ("--slo-itl-ms", "slo_itl_ms", "MS"),
        ("--max-in-flight", "max_in_flight", "N"),
        ("--timeout-s", "timeout_s", "S"),
        ("--json", "json", "FILE"),
        ("--compare", "compare", "URL"),
        ("--compare-api-key", "compare_api_key", "KEY"),
    ):
        add_option(parser, flag, BenchConfig, field, metavar)


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = load(BenchConfig, environ)
    launcher = load(LauncherConfig, environ)
    url = config.client.url or local_url(launcher, environ)
    if config.json:
        _check_writable(config.json)

    from bench.measure import Result
    from bench.report import as_json, as_table
    from bench.run import run_bench

    report = run_bench(config, url, config.client.api_key or first_api_key(launcher.gateway.api_keys), _progress)
    print(as_table(report), end="", flush=True)
    if config.json:
        Path(config.json).write_text(as_json(report))
    return 0 if all(target.figures.results[Result.OK] for target in report.targets) else 1


def _check_writable(path: str) -> None:
    """Before the run, not after it. Raises ConfigInvalid."""
    directory = Path(path).parent
    if not directory.is_dir() or Path(path).is_dir() or not os.access(directory, os.W_OK):
        raise ConfigInvalid(f"{JSON}={path!r}: cannot be written", param=JSON)


def _progress(text: str) -> None:
    """On standard error: standard output is the table."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
