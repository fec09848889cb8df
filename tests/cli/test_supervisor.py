"""Supervision of real, small child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.client import RemoteDisconnected
from pathlib import Path
from urllib.error import URLError

import pytest

from observability.probe import probe
from phasemesh.guard import Guard, running_guard
from phasemesh.ports import free_port
from phasemesh.state import start_ticks, wait_for_exit
from phasemesh.supervisor import RestartPolicy, Service, ServiceFailed, SupervisedService, stop_in_order
from wire.child import dying_with_us

TINY = str(Path(__file__).with_name("tiny_service.py"))
LAUNCHER = """
import asyncio, os, sys
from pathlib import Path
from phasemesh.guard import running_guard
from phasemesh.process import ChildProcess

async def main():
    with running_guard() as guard:
        child = ChildProcess(sys.argv[1:], os.environ, Path.cwd(), guard, lambda data: None)
        await child.wait()

asyncio.run(main())
"""
TIMEOUT_S = 10.0
USUAL = RestartPolicy()
QUICK = RestartPolicy(max_deaths=3, first_backoff_s=0.01)


@pytest.fixture
def guard() -> Iterator[Guard]:
    with running_guard() as guard:
        yield guard


def tiny(port: int, *flags: str, ready_timeout_s: float = TIMEOUT_S, stop_timeout_s: float = TIMEOUT_S) -> Service:
    url = f"http://127.0.0.1:{port}/health"
    return Service(
        name=f"tiny-{port}",
        command=(sys.executable, TINY, str(port), *flags),
        probe=partial(probe, url),
        health_url=url,
        environ=os.environ,
        ready_timeout_s=ready_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


class Console:
    """What the supervisor said, and an event each time it says or changes something."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._news = asyncio.Event()

    def say(self, text: str) -> None:
        self.lines.append(text)
        self._news.set()

    async def until(self, text: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not any(text in line for line in self.lines):
                self._news.clear()
                await self._news.wait()


def supervise(
    service: Service, guard: Guard, logs: Path, console: Console, policy: RestartPolicy = USUAL
) -> SupervisedService:
    return SupervisedService(service, guard=guard, logs=logs, say=console.say, on_change=lambda: None, policy=policy)


def crash(port: int) -> None:
    with pytest.raises((RemoteDisconnected, URLError, ConnectionError)):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/crash", timeout=TIMEOUT_S)


async def test_a_service_that_dies_is_named_and_restarted(guard: Guard, tmp_path: Path) -> None:
    port, console = free_port(set()), Console()
    supervised = supervise(tiny(port), guard, tmp_path, console)
    await supervised.start()
    assert supervised.process is not None
    first_pid = supervised.process.pid
    async with asyncio.TaskGroup() as tg:
        keeper = tg.create_task(supervised.keep_running())
        os.kill(first_pid, signal.SIGKILL)
        await console.until("is ready again")
        assert any(f"tiny-{port} was killed by SIGKILL; starting it again in 0.5 s" in line for line in console.lines)
        assert supervised.restarts == 1
        assert supervised.process.pid != first_pid
        assert probe(supervised.service.health_url) is None
        keeper.cancel()
    await supervised.stop()


async def crash_whenever_ready(port: int, console: Console) -> None:
    while True:
        await asyncio.to_thread(crash, port)
        await console.until("is ready again")
        console.lines.clear()


async def supervision_ends(supervised: SupervisedService, port: int, console: Console) -> ServiceFailed:
    """Start it and crash it whenever it is ready, until the supervisor has enough."""
    await supervised.start()
    crashing = asyncio.create_task(crash_whenever_ready(port, console))
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ServiceFailed) as failure:
            await supervised.keep_running()
    crashing.cancel()
    await asyncio.wait([crashing])
    await supervised.stop()
    return failure.value


async def test_a_service_that_keeps_dying_ends_the_supervision(guard: Guard, tmp_path: Path) -> None:
    port, console = free_port(set()), Console()
    supervised = supervise(tiny(port), guard, tmp_path, console, QUICK)
    error = await supervision_ends(supervised, port, console)
    assert f"tiny-{port} ended with exit status 3 (failure 3 in a row)" in error.message
    assert "about to crash" in error.message
    assert supervised.restarts == 2


async def test_a_service_that_dies_before_it_is_ready_again_ends_the_supervision_however_long_it_takes(
    guard: Guard, tmp_path: Path
) -> None:
    """Longer than it would have to be ready for to be well: time that it spends on dying is not that."""
    policy = RestartPolicy(max_deaths=3, first_backoff_s=0.01, settled_s=0.1)
    port, console, doomed = free_port(set()), Console(), tmp_path / "doomed"
    supervised = supervise(tiny(port, "--dies-late-if", str(doomed)), guard, tmp_path, console, policy)
    await supervised.start()
    doomed.touch()
    await asyncio.to_thread(crash, port)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ServiceFailed, match=r"ended with exit status 4 before it was ready \(failure 3 in a row\)"):
            await supervised.keep_running()
    await supervised.stop()


async def test_a_service_that_was_well_for_a_while_has_all_its_restarts_again(guard: Guard, tmp_path: Path) -> None:
    policy = RestartPolicy(max_deaths=2, first_backoff_s=0.01, settled_s=0.1)
    port, console = free_port(set()), Console()
    supervised = supervise(tiny(port), guard, tmp_path, console, policy)
    await supervised.start()
    async with asyncio.TaskGroup() as tg:
        keeper = tg.create_task(supervised.keep_running())
        for _ in range(2 * policy.max_deaths):
            await asyncio.sleep(1.5 * policy.settled_s)  # what is under test: it is well for so long
            await asyncio.to_thread(crash, port)
            await console.until("is ready again")
            console.lines.clear()
        keeper.cancel()
    await supervised.stop()


async def test_a_service_that_is_not_ready_in_time_after_a_restart_is_named_killed_and_started_again(
    guard: Guard, tmp_path: Path
) -> None:
    port, console, unwell = free_port(set()), Console(), tmp_path / "unwell"
    service = tiny(port, "--not-ready-if", str(unwell), ready_timeout_s=1.0)
    supervised = supervise(service, guard, tmp_path, console, QUICK)
    await supervised.start()
    unwell.touch()
    await asyncio.to_thread(crash, port)
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(ServiceFailed, match=r"was not ready within 1 s: .*503.* \(failure 3 in a row\)"):
            await supervised.keep_running()
    assert any("was not ready within 1 s" in line and "starting it again" in line for line in console.lines)
    assert supervised.process is not None
    assert supervised.process.returncode == -signal.SIGKILL
    await supervised.stop()


async def test_the_backoff_doubles(guard: Guard, tmp_path: Path) -> None:
    port, console = free_port(set()), Console()
    supervised = supervise(tiny(port), guard, tmp_path, console, RestartPolicy(first_backoff_s=0.01))
    await supervised.start()
    async with asyncio.TaskGroup() as tg:
        keeper = tg.create_task(supervised.keep_running())
        for backoff in ("0.01", "0.02", "0.04"):
            await asyncio.to_thread(crash, port)
            await console.until(f"starting it again in {backoff} s")
            await console.until("is ready again")
            console.lines.clear()
        keeper.cancel()
    await supervised.stop()


async def test_a_service_that_dies_at_start_is_reported_with_its_last_lines(guard: Guard, tmp_path: Path) -> None:
    service = tiny(free_port(set()))
    broken = Service(
        name="broken",
        command=(sys.executable, "-c", "print('no such thing as port 9'); raise SystemExit(7)"),
        probe=service.probe,
        health_url=service.health_url,
        environ=os.environ,
    )
    supervised = supervise(broken, guard, tmp_path, Console())
    with pytest.raises(ServiceFailed, match=r"broken ended with exit status 7 before it was ready(?s:.*)port 9"):
        await supervised.start()
    await supervised.stop()


async def test_a_service_that_never_gets_ready_is_reported(guard: Guard, tmp_path: Path) -> None:
    supervised = supervise(tiny(free_port(set()), "--not-ready", ready_timeout_s=0.5), guard, tmp_path, Console())
    with pytest.raises(ServiceFailed, match=r"was not ready within 0.5 s: .*503"):
        await supervised.start()
    await supervised.stop()


async def test_a_command_that_does_not_exist_is_reported(guard: Guard, tmp_path: Path) -> None:
    service = tiny(free_port(set()))
    missing = Service("missing", ("/no/such/program",), service.probe, service.health_url, os.environ)
    supervised = supervise(missing, guard, tmp_path, Console())
    with pytest.raises(ServiceFailed, match=r"missing ended with exit status 1(?s:.*)/no/such/program"):
        await supervised.start()
    await supervised.stop()


async def test_groups_stop_one_after_the_other(guard: Guard, tmp_path: Path) -> None:
    taken: set[int] = set()
    first, second = (supervise(tiny(free_port(taken)), guard, tmp_path, Console()) for _ in range(2))
    async with asyncio.TaskGroup() as tg:
        tg.create_task(first.start())
        tg.create_task(second.start())
    assert first.process is not None and second.process is not None
    await stop_in_order([[first], [second]])
    assert first.process.returncode == second.process.returncode == 0


async def test_a_service_deaf_to_sigterm_is_killed_in_time(guard: Guard, tmp_path: Path) -> None:
    console = Console()
    supervised = supervise(tiny(free_port(set()), "--deaf", stop_timeout_s=0.2), guard, tmp_path, console)
    await supervised.start()
    await supervised.stop()
    assert supervised.process is not None
    assert supervised.process.returncode == -signal.SIGKILL
    assert "did not end within 0.2 s" in console.lines[-1]


async def test_warnings_reach_the_console_and_everything_the_log(guard: Guard, tmp_path: Path) -> None:
    console = Console()
    supervised = supervise(tiny(free_port(set())), guard, tmp_path, console)
    await supervised.start()
    await console.until("WARNING tiny tiny.service: serving")
    await supervised.stop()
    assert "serving" in (tmp_path / f"{supervised.service.name}.log").read_text()


async def test_what_a_dead_service_left_behind_is_killed(guard: Guard, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    supervised = supervise(tiny(free_port(set()), "--grandchild", str(pids)), guard, tmp_path, Console())
    await supervised.start()
    pid, grandchild = map(int, pids.read_text().split())
    os.kill(pid, signal.SIGKILL)
    assert supervised.process is not None
    await supervised.process.wait()
    assert await asyncio.to_thread(wait_for_exit, grandchild, TIMEOUT_S)
    await supervised.stop()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_children_and_grandchildren_die_with_the_launcher(number: int, tmp_path: Path) -> None:
    pids, port = tmp_path / "pids", free_port(set())
    service = tiny(port, "--deaf", "--grandchild", str(pids))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, *service.command], cwd=tmp_path) as launcher:
        try:
            _wait_until_ready(service)
            child, grandchild = map(int, pids.read_text().split())
            assert start_ticks(child) is not None and start_ticks(grandchild) is not None
            launcher.send_signal(number)
            launcher.wait(TIMEOUT_S)
            assert wait_for_exit(child, TIMEOUT_S)
            assert wait_for_exit(grandchild, TIMEOUT_S)
        finally:
            launcher.kill()


def _wait_until_ready(service: Service) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while service.probe() is not None:
        assert time.monotonic() < deadline, service.probe()
        time.sleep(0.02)


def test_a_child_whose_parent_is_already_gone_does_not_begin(tmp_path: Path) -> None:
    command = dying_with_us(["/bin/true"])
    command[4] = "1"  # not our pid
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode != 0
    assert "parent died" in done.stderr
