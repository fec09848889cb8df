"""Time and memory of `phasemesh up`: `python -m bench.startup [--weight-dtype T] [--workers N]`.

Every round starts a whole stack with its own Redis on free ports, waits for the answer to its first question, reads
the kernel's proportional set sizes (a page that n processes map counts 1/n in each) and stops it. The first round
fills the caches and is not measured. The bars: ready within 8 s; all workers together within 1.2 × stored weights,
which they share, + for each its KV pool and 400 MB.
"""

from __future__ import annotations

import argparse
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from bench.openai_stream import BenchFailed
from bench.stack import running_stack

MB = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one process, bytes of proportional set size (proc(5): smaps_rollup)."""

    total: int
    anonymous: int
    file: int

    @classmethod
    def parse(cls, rollup: str) -> Memory:
        values = {name: 1024 * int(kilobytes) for name, kilobytes in re.findall(r"^(\w+): +(\d+) kB", rollup, re.M)}
        return cls(values["Pss"], values["Pss_Anon"], values["Pss_File"] + values["Pss_Shmem"])


@dataclass(frozen=True, slots=True)
class Started:
    """One run of the stack."""

    ready_s: float
    """From the command to the end of the first answer."""
    services_s: dict[str, float]
    memory: dict[str, Memory]
    weight_files: dict[str, int]
    """Size in bytes of the safetensors files that workers map."""


def start_once(options: list[str], kv_memory_mb: int) -> Started:
    """Start, look, stop. Raises BenchFailed with the launcher's output when it ends before it is ready."""
    with running_stack(options, {"KV_MEMORY_MB": str(kv_memory_mb), "LOG_LEVEL": "info"}) as stack:
        pids = stack.pids()
        memory = {name: Memory.parse(Path(f"/proc/{pid}/smaps_rollup").read_text()) for name, pid in pids.items()}
        workers = [pid for name, pid in pids.items() if name.startswith("worker")]
        return Started(stack.ready_s, stack.services_s, memory, weight_files(workers))


def weight_files(pids: list[int]) -> dict[str, int]:
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if line.endswith(".safetensors")}
    return {path: Path(path).stat().st_size for path in paths}


def report(rounds: list[Started], kv_memory_mb: int) -> str:
    """The measured rounds as text: medians of the times, the last round's memory."""
    last = rounds[-1]
    times = [r.ready_s for r in rounds]
    lines = [
        f"ready after {statistics.median(times):.1f} s (max {max(times):.1f} of {len(times)}; bar 8)",
        f"{'':>12} {'ready s':>8} {'memory MB':>10} {'anonymous':>10} {'file':>6}",
    ]
    for name, memory in last.memory.items():
        ready_s = statistics.median(r.services_s[name] for r in rounds)
        sizes = f"{memory.total / MB:10.0f} {memory.anonymous / MB:10.0f} {memory.file / MB:6.0f}"
        lines.append(f"{name:>12} {ready_s:8.1f} {sizes}")
    for path, size in last.weight_files.items():
        lines.append(f"mapped weights: {Path(path).name}, {size / MB:.0f} MB")
    workers = [memory.total for name, memory in last.memory.items() if name.startswith("worker")]
    stored = sum(last.weight_files.values())
    bar = 1.2 * stored + len(workers) * (kv_memory_mb * 2**20 + 400 * MB)
    # Converted weights are in no file: a small model's, and other types than float32 without the CPU kernels.
    judged = f"bar {bar / MB:.0f}, KV pool {kv_memory_mb} MiB each" if stored else "no bar: no weights are mapped"
    lines.append(f"workers together: {sum(workers) / MB:.0f} MB ({judged})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or name; default: PHASEMESH_MODEL")
    parser.add_argument("--weight-dtype", default="auto")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--kv-memory-mb", type=int, default=64, help="small, so that a pool hides nothing else")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    options = ["--weight-dtype", arguments.weight_dtype, "--workers", str(arguments.workers)]
    if arguments.model:
        options += ["--model", arguments.model]
    try:
        runs = [start_once(options, arguments.kv_memory_mb) for _ in range(1 + arguments.rounds)]
    except BenchFailed as error:
        raise SystemExit(f"bench.startup: {error.message}") from None
    print(f"{arguments.weight_dtype}, {arguments.workers} worker(s)")
    print(report(runs[1:], arguments.kv_memory_mb))


if __name__ == "__main__":
    main()
