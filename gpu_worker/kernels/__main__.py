"""`python -m gpu_worker.kernels`: build the CPU kernels unless they are built. Never fails: without, torch serves.

`--output DIR` builds into a folder (an image's); there, failing is an error.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from gpu_worker.kernels.build import KernelsUnavailable, library_path
from wire.config import WorkerConfig, load
from wire.errors import MeshError
from wire.model_path import cache_root


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.kernels", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder that gets a copy of the library")
    output: Path | None = parser.parse_args().output
    try:
        config = load(WorkerConfig, os.environ)
    except MeshError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return 2
    if config.cpu_kernels == "off" and output is None:
        return 0
    try:
        library = library_path(cache_root(config.model))
    except KernelsUnavailable as obstacle:
        print(f"CPU kernels: {obstacle}; torch's own are used", file=sys.stderr)
        return 0 if output is None else 1
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
