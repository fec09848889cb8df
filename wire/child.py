"""Children that end with their parent, however it ends, and import what it imports.

`python child.py PARENT_PID COMMAND…`: become COMMAND, to be killed by the kernel when the parent dies. A shim that
execs, not a hook between fork and exec: nothing of the parent's locks or threads is in it. Run by file name with
-I -S, so it costs a few milliseconds and imports the standard library only. The death signal survives exec and covers
COMMAND itself; what COMMAND starts is phasemesh.guard's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def dying_with_us(command: Sequence[str]) -> list[str]:
    """The command line that runs `command` through this shim, as a child of the calling process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def die_with_parent() -> None:
    """Be killed when the parent is gone. Does nothing elsewhere than on Linux. Raises OSError."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def importing_as_we_do() -> dict[str, str]:
    """Our environment, for a `python -m` of a module of ours: found there whatever the working directory is."""
    import_path = [str(Path(__file__).absolute().parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, import_path))}


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    die_with_parent()
    if os.getppid() != parent:
        raise SystemExit("parent died before its child began")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"{command[0]}: {error.strerror}") from None


if __name__ == "__main__":
    main()
