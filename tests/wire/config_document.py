"""Renders docs/configuration.md from wire/config.py: `python -m tests.wire.config_document` writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wire.config import CONFIGS, env_fields

DOCUMENT = Path(__file__).parents[2] / "docs" / "configuration.md"

HEAD = """\
# Configuration

Every service reads its variables once, at start. A malformed value, and any `PHASEMESH_…` name that nobody reads, ends
the start with a message that names the variable. A variable set to nothing is unset. Tracing has its own, standard
variables: see [observability](observability.md).

<!-- Rendered from wire/config.py by `python -m tests.wire.config_document`; a test compares them. -->
"""


def rendered() -> str:
    """The whole document: a table per config class."""
    return "\n".join([HEAD, *(_section(cls) for cls in CONFIGS)])


def _section(cls: type[Any]) -> str:
    title = cls.__name__.removesuffix("Config")
    about = "" if cls.__doc__ is None or cls.__doc__.startswith(cls.__name__) else f"{cls.__doc__}\n\n"
    rows = "".join(_row(f.metadata["env"], f.default, f.metadata) + "\n" for f in env_fields(cls))
    return f"## {title}\n\n{about}| Variable | Default | Meaning |\n|---|---|---|\n{rows}"


def _row(variable: str, default: Any, metadata: Any) -> str:
    shown = "" if default is None else f"`{str(default).lower() if isinstance(default, bool) else default}`"
    meaning = metadata["help"]
    if metadata["choices"]:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in metadata["choices"]) + "."
    if metadata["minimum"] is not None:
        meaning += f" At least {metadata['minimum']}."
    return f"| `{variable}` | {shown} | {meaning} |"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered())
