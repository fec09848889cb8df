"""`make up`, the first thing a newcomer types, and Ctrl-C, the second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from phasemesh.ports import free_port
from phasemesh.state import StateDir, wait_for_exit

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 240.0
"""When the pins changed since the last one, `make up` installs them first."""
TIMEOUT_S = 30.0


@pytest.mark.timeout(300)
@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="make would fill a virtual environment of its own")
@pytest.mark.usefixtures("smollm2_dir")
def test_make_up_answers_and_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    port, state = free_port(set()), StateDir(tmp_path / "state")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PHASEMESH_", "MAKE"))}
    if "PHASEMESH_CACHE_DIR" in os.environ:  # where smollm2_dir is
        environ["PHASEMESH_CACHE_DIR"] = os.environ["PHASEMESH_CACHE_DIR"]
    console = tmp_path / "console"
    with (
        console.open("wb") as out,
        subprocess.Popen(
            ["make", "up", f"ARGS=--port {port} --state-dir {state.path}"],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # and so a process group, which a terminal would send SIGINT to
        ) as make,
    ):
        try:
            until(lambda: "Ctrl-C stops it." in console.read_text(), make, console)
            assert "Paris" in console.read_text().split("> What is the capital of France?\n")[1].splitlines()[0]
            family = psutil.Process(make.pid).children(recursive=True)
            stack = state.running()
            assert stack is not None
            services = {service.pid for service in stack.services}
            assert len(services) == 4
            assert services | {stack.pid} <= {process.pid for process in family}
            os.killpg(make.pid, signal.SIGINT)
            status = make.wait(TIMEOUT_S)
        finally:
            if make.poll() is None:
                os.killpg(make.pid, signal.SIGKILL)
    said = console.read_text()
    # make waits for the command, would report a failure of it as its last line, and then ends by the signal it got.
    assert said.endswith("stopped\n"), said
    assert status == -signal.SIGINT, said
    assert all(wait_for_exit(process.pid, TIMEOUT_S) for process in family)
    assert state.running() is None


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes], console: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not condition():
        assert process.poll() is None, console.read_text()
        assert time.monotonic() < deadline, console.read_text()
        time.sleep(0.05)  # a file announces nothing
