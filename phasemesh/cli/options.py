"""Options are variables: each command-line option is one field of wire.config, with its help, default and name.

`--port 9000` is `PHASEMESH_PORT=9000` for this one command. Parsing only lays the option over the environment;
wire.config.load reads, checks and refuses, for both the same way.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from wire.config import PREFIX, env_fields
from wire.errors import ConfigInvalid

Handler = Callable[[argparse.Namespace, Mapping[str, str]], int]
"""A subcommand: parsed arguments and the environment with its options laid over → exit status."""


class Subparsers(Protocol):
    """What argparse's add_subparsers returns, as far as we use it."""

    def add_parser(self, name: str, **kwargs: Any) -> argparse.ArgumentParser: ...


def add_command(
    subparsers: Subparsers, name: str, handler: Handler, summary: str, teaching: str
) -> argparse.ArgumentParser:
    """A subcommand whose --help ends with `teaching`: what it does, with examples."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=teaching,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(handler=handler)
    return parser


def add_option(parser: argparse.ArgumentParser, flag: str, config: type[Any], field: str, metavar: str) -> None:
    """Make a config field an option. One that is on or off may be given without a value, for on."""
    spec = next(f for f in env_fields(config) if f.name == field)
    choices = spec.metadata["choices"]
    is_switch = isinstance(spec.default, bool)
    default = "" if spec.default is None else f", default {spec.default}"
    help_text = f"{spec.metadata['help']} [{spec.metadata['env']}{default}]"
    parser.set_defaults(flags={**(parser.get_default("flags") or {}), spec.metadata["env"]: flag})
    parser.add_argument(
        flag,
        dest=spec.metadata["env"],
        metavar="|".join(choices) if choices else metavar,
        nargs="?" if is_switch else None,
        const="on" if is_switch else None,
        help=help_text.replace("%", "%%"),
    )


def overlay(arguments: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the given options laid over it."""
    return {**environ, **_given(arguments)}


def in_words_of_the_user(error: ConfigInvalid, arguments: argparse.Namespace) -> str:
    """The message with the option's name where the value came from an option."""
    if error.param in _given(arguments):
        flag = arguments.flags[error.param]
        return error.message.replace(f"{error.param}=", f"{flag} ", 1)
    return error.message


def _given(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: value for name, value in vars(arguments).items() if name.startswith(PREFIX) and value is not None}
