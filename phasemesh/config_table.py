"""`python -m phasemesh.config_table README.md`: rewrite its table of variables from wire.config.

The table stands between two marker lines; a test checks that file and code agree.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any

from wire.config import CONFIGS, env_fields

BEGIN = "<!-- configuration table: begin (make docs) -->"
END = "<!-- configuration table: end -->"
TITLES = {
    "CellConfig": "Every service",
    "ModelConfig": "The model",
    "WorkerConfig": "Worker",
    "SimulationConfig": "Simulated worker",
    "TierConfig": "KV below a worker's pages",
    "BatchingConfig": "Batching policy",
    "SchedulerConfig": "Scheduler",
    "GatewayConfig": "Gateway",
    "LauncherConfig": "`phasemesh up`",
    "ClientConfig": "`phasemesh chat`",
    "BenchConfig": "`phasemesh bench`",
}


def table() -> str:
    """One Markdown table, grouped by config class in the order of CONFIGS."""
    return "\n".join(["| variable | default | what it sets |", "|---|---|---|", *_rows()])


def _rows() -> Iterator[str]:
    for config in CONFIGS:
        yield f"| **{TITLES[config.__name__]}** | | |"
        for f in env_fields(config):
            yield _row(f)


def _row(f: Field[Any]) -> str:
    text = f.metadata["help"]
    if f.metadata["choices"]:
        text += f" ({', '.join(f.metadata['choices'])})"
    default = "" if f.default is None else f"`{f.default}`"
    return f"| `{f.metadata['env']}` | {default} | {text.replace('|', chr(92) + '|')} |"


def with_table(document: str) -> str:
    """The document with what stands between the markers replaced. Raises ValueError when they are missing."""
    before, found_begin, rest = document.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"no {BEGIN!r} … {END!r}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))
