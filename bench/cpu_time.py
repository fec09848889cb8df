"""CPU time of processes, from proc(5). Linux only."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Seconds of CPU, user and system, that a process, its threads and its ended children have used.

    In the kernel's clock ticks, so no finer than 10 ms on most machines. Raises OSError when it is gone.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before it may hold anything
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime
