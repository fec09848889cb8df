"""`phasemesh up` with the real model, as a user meets it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from observability.probe import probe
from phasemesh import redis_server
from phasemesh.ports import free_port
from phasemesh.state import StackState, StateDir, wait_for_exit
from tests.redis_fixture import redis_url

__all__ = ["redis_url"]

CLI = (sys.executable, "-m", "phasemesh")
READY_TIMEOUT_S = 90.0
TIMEOUT_S = 30.0


class Up:
    """One running `phasemesh up`."""

    def __init__(self, state_dir: Path, model: Path, *options: str) -> None:
        self.state = StateDir(state_dir)
        self.port = free_port(set())
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("PHASEMESH_")}
        self.environ |= {"PHASEMESH_STATE_DIR": str(state_dir), "PHASEMESH_KV_PAGES": "128"}
        self.console = state_dir.with_suffix(".out")
        with self.console.open("wb") as out:
            self.process = subprocess.Popen(
                [*CLI, "up", "--model", str(model), "--port", str(self.port), *options],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def until_said(self, text: str, timeout_s: float = READY_TIMEOUT_S) -> str:
        deadline = time.monotonic() + timeout_s
        while text not in (said := self.console.read_text()):
            assert self.process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.05)
        return said

    def stack(self) -> StackState:
        stack = self.state.running()
        assert stack is not None
        return stack

    def pid_of(self, name: str) -> int:
        pid = next(s.pid for s in self.stack().services if s.name == name)
        assert pid is not None
        return pid

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*CLI, *arguments], env=self.environ, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def up(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(tmp_path_factory.mktemp("up") / "state", smollm2_dir)
    try:
        running.until_said("Ctrl-C stops it.")
        yield running
    finally:
        running.process.kill()
        running.process.wait()


def test_up_asks_the_model_one_question_and_prints_urls(up: Up) -> None:
    said = up.until_said("Ctrl-C stops it.")
    assert "> What is the capital of France?\n" in said
    assert "Paris" in said.split("> What is the capital of France?\n")[1].splitlines()[0]
    assert f"curl -N http://127.0.0.1:{up.port}/v1/chat/completions" in said


def test_chat_finds_the_running_stack_and_streams(up: Up) -> None:
    done = up.run("chat", "--temperature", "0", "--max-tokens", "24", "What is the capital of France?")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_chat_says_in_one_line_what_the_gateway_refuses(up: Up) -> None:
    done = up.run("chat", "--max-tokens", "100000000", "Hello")
    assert done.returncode == 1
    assert done.stderr.startswith("phasemesh: ") and done.stderr.count("\n") == 1


def test_status_shows_each_service_and_the_pages(up: Up) -> None:
    done = up.run("status")
    assert done.returncode == 0, done.stdout + done.stderr
    for service in ("redis", "scheduler", "worker-1", "gateway"):
        assert re.search(rf"^{service} +{up.pid_of(service)} +\S+ +\d+  ready$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^role of worker-1: both, \d+ sequence\(s\) running$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^KV pages of worker-1: .*; 128 in all$", done.stdout, re.MULTILINE), done.stdout


def test_a_second_up_in_the_same_state_directory_says_who_runs(up: Up) -> None:
    done = up.run("up")
    assert done.returncode == 2
    assert f"a stack already runs in {up.state.path} (pid {up.process.pid}, http://127.0.0.1:{up.port})" in done.stderr


def test_a_second_up_on_the_same_port_says_which(up: Up, tmp_path: Path) -> None:
    done = up.run("up", "--state-dir", str(tmp_path), "--port", str(up.port))
    assert done.returncode == 2
    assert f"port {up.port} on 127.0.0.1 is in use; choose another with --port" in done.stderr


@pytest.mark.parametrize("service", ["worker-1", "scheduler", "gateway", "redis"])
def test_a_killed_service_is_restarted_and_answers_again(up: Up, service: str) -> None:
    before = up.console.read_text()
    os.kill(up.pid_of(service), signal.SIGKILL)
    deadline = time.monotonic() + READY_TIMEOUT_S
    while f"{service} is ready again" not in up.console.read_text()[len(before) :]:
        assert time.monotonic() < deadline, up.console.read_text()
        time.sleep(0.05)
    assert f"{service} was killed by SIGKILL; starting it again" in up.console.read_text()[len(before) :]
    while probe(f"http://127.0.0.1:{up.port}/health") is not None:
        assert time.monotonic() < deadline, up.console.read_text()
        time.sleep(0.05)
    done = up.run("chat", "--temperature", "0", "--max-tokens", "24", "What is the capital of France?")
    assert "Paris" in done.stdout, done.stderr


def test_down_lets_a_running_answer_finish_and_stops_every_service(up: Up) -> None:
    pids = [s.pid for s in up.stack().services]
    command = [*CLI, "chat", "--temperature", "0", "--max-tokens", "60", "Tell me a long story about the sea."]
    with subprocess.Popen(command, env=up.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdout is not None and chat.stderr is not None
        begin = chat.stdout.read(1)
        done = up.run("down")
        rest, errors = chat.communicate(timeout=TIMEOUT_S)
    assert (chat.returncode, errors) == (0, b"")
    assert len((begin + rest).split()) > 30
    assert done.returncode == 0, done.stdout + done.stderr
    assert up.process.wait(TIMEOUT_S) == 0
    assert up.console.read_text().endswith("stopped\n")
    for pid in pids:
        assert pid is not None and wait_for_exit(pid, TIMEOUT_S)
    assert up.run("status").returncode == 3
    assert up.run("down").stdout == f"no stack runs in {up.state.path}\n"


def test_up_names_the_service_that_cannot_start_and_stops_the_others(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "none"}')
    running = Up(tmp_path / "state", model)
    try:
        assert running.process.wait(READY_TIMEOUT_S) == 1
    finally:
        running.process.kill()
        running.process.wait()
    said = running.console.read_text()
    assert re.search(r"^phasemesh: \S+ ended with exit status \d before it was ready; the end of", said, re.MULTILINE)
    assert "Traceback" not in said
    assert running.state.running() is None


@pytest.mark.timeout(300)
def test_up_ends_when_a_service_keeps_dying_and_names_it(smollm2_dir: Path, tmp_path: Path) -> None:
    """The weights are damaged behind a running worker's back: it cannot load them again after its death."""
    model = tmp_path / "model"
    model.mkdir()
    for file in smollm2_dir.iterdir():
        (model / file.name).symlink_to(file)
    running = Up(tmp_path / "state", model)
    try:
        running.until_said("Ctrl-C stops it.")
        pids = [s.pid for s in running.stack().services]
        (model / "model.safetensors").unlink()
        with (smollm2_dir / "model.safetensors").open("rb") as whole:
            (model / "model.safetensors").write_bytes(whole.read(1 << 20))
        os.kill(running.pid_of("worker-1"), signal.SIGKILL)
        assert running.process.wait(2 * READY_TIMEOUT_S) == 1  # five starts of a worker
    finally:
        running.process.kill()
        running.process.wait()
    said = running.console.read_text()
    assert "phasemesh: worker-1 ended with exit status 1 before it was ready (failure 5 in a row)" in said
    assert "Traceback" not in said
    assert running.state.running() is None
    for pid in pids:
        assert pid is not None and wait_for_exit(pid, TIMEOUT_S)


def test_a_redis_that_is_named_is_used_and_left_running(redis_url: str, smollm2_dir: Path, tmp_path: Path) -> None:
    running = Up(tmp_path / "state", smollm2_dir, "--redis-url", redis_url)
    try:
        running.until_said("Ctrl-C stops it.")
        assert [s.name for s in running.stack().services if s.name == "redis"] == []
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(TIMEOUT_S) == 0
    finally:
        running.process.kill()
        running.process.wait()
    assert redis_server.ping(redis_url) is None


def test_a_simulated_stack_answers_without_torch(smollm2_dir: Path, tmp_path: Path) -> None:
    running = Up(tmp_path / "state", smollm2_dir, "--simulate")
    try:
        said = running.until_said("Ctrl-C stops it.")
        assert "1 simulated worker(s)" in said
        assert said.split("> What is the capital of France?\n")[1].splitlines()[0]
        assert "torch" not in Path(f"/proc/{running.pid_of('worker-1')}/maps").read_text()
        assert running.run("chat", "--max-tokens", "24", "Hello").returncode == 0
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(TIMEOUT_S) == 0


def test_a_stack_of_separate_pools_answers_and_its_roles_can_be_changed(smollm2_dir: Path, tmp_path: Path) -> None:
    options = ("--simulate", "--workers", "3", "--roles", "prefill,decode,decode")
    running = Up(tmp_path / "state", smollm2_dir, *options)
    try:
        said = running.until_said("Ctrl-C stops it.")
        assert "(prefill, decode, decode)" in said
        assert said.split("> What is the capital of France?\n")[1].splitlines()[0]
        shown = running.run("role").stdout.splitlines()
        assert [line.split()[0] for line in shown[1:]] == ["worker-1", "worker-2", "worker-3"]
        refused = running.run("role", "worker-1", "decode")
        assert refused.returncode == 1 and "no worker would be left that can prefill" in refused.stderr
        assert "worker-2" in running.run("role", "worker-2", "both").stdout
        assert running.run("chat", "--max-tokens", "24", "Hello").returncode == 0
    finally:
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(TIMEOUT_S) == 0


def test_no_service_outlives_a_killed_launcher(smollm2_dir: Path, tmp_path: Path) -> None:
    running = Up(tmp_path / "state", smollm2_dir, "--workers", "2")
    try:
        running.until_said("Ctrl-C stops it.")
        pids = [s.pid for s in running.stack().services]
        assert len(pids) == 5
    finally:
        running.process.kill()
        running.process.wait()
    for pid in pids:
        assert pid is not None and wait_for_exit(pid, TIMEOUT_S)
