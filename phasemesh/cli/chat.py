"""`phasemesh chat`: one question to a running gateway, the answer as it comes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from phasemesh.cli.options import Subparsers, add_command, add_option
from phasemesh.client import Client, Generation
from phasemesh.state import local_url
from wire.api_keys import first_api_key
from wire.config import ClientConfig, GatewayConfig, LauncherConfig, load

CHAT = """\
Asks the stack of the state directory, or the gateway at --url.

examples:
  phasemesh chat "What is a page table?"
  phasemesh chat --temperature 0 --max-tokens 40 "Count to ten."
  phasemesh chat --url http://gpu-box:8000 "Hello!"
"""


def add(subparsers: Subparsers) -> None:
    parser = add_command(subparsers, "chat", run, "Ask a running gateway and stream the answer.", CHAT)
    parser.add_argument("question", help="what to ask")
    add_option(parser, "--url", ClientConfig, "url", "URL")
    add_option(parser, "--port", GatewayConfig, "port", "P")
    add_option(parser, "--state-dir", LauncherConfig, "state_dir", "D")
    add_option(parser, "--api-key", ClientConfig, "api_key", "KEY")
    add_option(parser, "--max-tokens", ClientConfig, "max_tokens", "N")
    add_option(parser, "--temperature", ClientConfig, "temperature", "T")


def run(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    config = load(ClientConfig, environ)
    launcher = load(LauncherConfig, environ)
    api_key = config.api_key or first_api_key(launcher.gateway.api_keys)
    client = Client(config.url or local_url(launcher, environ), api_key)
    generation = Generation(max_tokens=config.max_tokens, temperature=config.temperature)
    try:
        for piece in client.chat(client.model(), arguments.question, generation):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
    return 0
