"""Compiles gpu_worker/kernels/src into one shared library, once: later processes find it by its name.

The library holds every instruction set and uses neither Python's nor torch's ABI (only the OpenMP runtime that torch
has loaded), so its name depends on sources, flags and architecture alone, and one built in an image runs on any host.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_worker.kernels.locked import locked

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where an image's build puts its library."""
COMPILE_TIMEOUT_S = 120.0
# -ffp-contract: a multiply and an add become one fma wherever there is one, in tiles of every shape alike.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-tree-slp-vectorize",
    "-Wall",
    "-Wextra",
)
_X86_SETS = {"avx512": ("-mavx512f", "-mavx2", "-mfma"), "avx2": ("-mavx2", "-mfma"), "baseline": ()}


class KernelsUnavailable(Exception):
    """Why there are no kernels, in one line."""


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Compiled sets, best first, and their flags; `baseline` is what every CPU of the architecture has."""
    return _X86_SETS if platform.machine() in ("x86_64", "AMD64") else {"baseline": ()}


def library_name() -> str:
    digest = hashlib.sha256(repr((_FLAGS, instruction_sets())).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return f"kernels-{platform.machine()}-{digest.hexdigest()[:16]}.so"


def library_path(cache_dir: Path) -> Path:
    """The library, compiled into cache_dir/kernels if it is not there nor in the image.

    Raises KernelsUnavailable when it cannot be.
    """
    if (PREBUILT / library_name()).is_file():
        return PREBUILT / library_name()
    target = cache_dir / "kernels" / library_name()
    if target.is_file():
        return target
    compiler = _compiler()
    try:
        with locked(target):  # two workers that start together compile once
            if not target.is_file():
                _compile(compiler, target)
    except OSError as error:
        raise KernelsUnavailable(f"{target}: {error.strerror}") from error
    return target


def _compiler() -> str:
    if sys.platform != "linux":
        raise KernelsUnavailable(f"they are built on Linux only, not {sys.platform}")
    name = os.environ.get("CXX", "g++")
    found = shutil.which(name)
    if found is None:
        raise KernelsUnavailable(f"no C++ compiler ({name}) on PATH")
    return found


def _compile(compiler: str, target: Path) -> None:
    """All objects side by side, linked beside the target and renamed onto it: it is there whole or not at all."""
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        folder = Path(scratch)
        objects = {"cpu": (SOURCES / "cpu.cpp", ())} | {
            name: (SOURCES / "kernels.cpp", (f"-DISA={name}", *flags)) for name, flags in instruction_sets().items()
        }
        with ThreadPoolExecutor() as threads:
            done = [
                threads.submit(_run, [compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(folder / f"{name}.o")])
                for name, (source, flags) in objects.items()
            ]
            for future in done:
                future.result()
        # Linked without OpenMP: its symbols come from the runtime that torch has loaded, and the threads are torch's.
        library = folder / "library.so"
        _run([compiler, "-shared", *(str(folder / f"{name}.o") for name in objects), "-o", str(library)])
        library.replace(target)


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if "error" in line] or error.stderr.splitlines() or ["?"]
        raise KernelsUnavailable(f"{command[0]} failed: {lines[0].strip()}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{command[0]} failed: {error}") from error
