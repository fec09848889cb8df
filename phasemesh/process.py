"""One child process of the launcher, on the event loop: its exit is an event, its output a callback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from phasemesh.guard import Guard
from wire.child import dying_with_us

_READ_BYTES = 65_536


class ChildProcess:
    """A command in a session of its own, which dies with us.

    Starting is one synchronous call, so a cancelled task never loses a process that it had just begun. Raises
    OSError when the command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path,
        guard: Guard,
        on_output: Callable[[bytes], None],
    ) -> None:
        self._guard = guard
        self._on_output = on_output
        self._exited = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._popen = subprocess.Popen(
            dying_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            cwd=cwd,
            start_new_session=True,
        )
        guard.watch(self.pid)
        self.started_unix_s = time.time()
        assert self._popen.stdout is not None
        self._output_fd = self._popen.stdout.fileno()
        os.set_blocking(self._output_fd, False)
        self._loop.add_reader(self._output_fd, self._read_output)
        self._pidfd = os.pidfd_open(self.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: killed by that signal."""
        return self._popen.returncode

    async def wait(self) -> int:
        """Until the process has ended and its output is read."""
        await self._exited.wait()
        assert self._popen.returncode is not None
        return self._popen.returncode

    def terminate(self) -> None:
        """Ask the process, not what it started, to drain and end."""
        if not self._exited.is_set():
            self._popen.terminate()

    def kill(self) -> None:
        """End the process and everything in its session's first group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _read_output(self) -> bool:
        """Hand on what can be read now; whether there may be more at once."""
        assert self._popen.stdout is not None
        try:
            data = os.read(self._output_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if data:
            self._on_output(data)
        else:
            self._close_output()
        return bool(data)

    def _on_exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.kill()  # before it is reaped, while the group's number is surely its own: what it left behind
        self._popen.wait()
        self._guard.forget(self.pid)
        while not self._output_closed and self._read_output():
            pass
        self._close_output()  # even if a process that left the group still holds the other end
        self._exited.set()

    @property
    def _output_closed(self) -> bool:
        assert self._popen.stdout is not None
        return self._popen.stdout.closed

    def _close_output(self) -> None:
        if not self._output_closed:
            assert self._popen.stdout is not None
            self._loop.remove_reader(self._output_fd)
            self._popen.stdout.close()


def describe_exit(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"ended with exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}"
