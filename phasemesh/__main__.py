"""Entry of the `phasemesh` command. Every error is one line and a non-zero exit status."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from phasemesh.cli import bench, chat, doctor, models, options, role, status, up
from wire.errors import ConfigInvalid, MeshError

INTERRUPTED = 130

TEACHING = """\
first steps:
  phasemesh doctor            can it run here?
  phasemesh up                run it: Redis, scheduler, worker, gateway
  phasemesh chat "Hello!"     from another terminal
  phasemesh status            what runs, and how it is
  phasemesh down              stop it

`phasemesh COMMAND --help` says more. Each option is also a variable, in [brackets]; README.md lists all of them.
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phasemesh",
        description="An LLM serving mesh: prefill and decode scheduled for what they are.",
        epilog=TEACHING,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (up, status, role, chat, bench, doctor, models):
        command.add(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status: 0 done, 1 failed, 2 wrong usage or configuration."""
    arguments = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return int(arguments.handler(arguments, options.overlay(arguments, os.environ)))
    except ConfigInvalid as error:
        print(f"phasemesh: {options.in_words_of_the_user(error, arguments)}", file=sys.stderr)
        return 2
    except MeshError as error:
        print(f"phasemesh: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds like Ctrl-C, so that whatever is being cleaned up is."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
