"""Who may share memory: equal only on workers of one boot of one kernel that see each other's processes."""

from __future__ import annotations

import os
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


def host_id() -> str:
    """Boot id and pid namespace; empty where a system tells neither: no memory is shared then."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{os.stat(_PID_NAMESPACE).st_ino}"  # noqa: PTH116  # of what it links to
    except OSError:
        return ""
