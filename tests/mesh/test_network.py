"""The hosts of tests/mesh/hosts.py themselves: a cut is silent and one way, and nothing is left of a killed test."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpu_worker.transfer.host_id import host_id
from tests.mesh.hosts import WAYS, open_network
from tests.mesh.namespaces import NAMESPACES, NamespaceNetwork, remove_leftovers
from tests.mesh.network import Network
from tests.redis_fixture import die_with_parent, free_port

ANSWER_S = 10.0
SILENCE_S = 0.5
"""Of a message that is cut off: how long we listen for it."""
ECHO = """
import socket, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
print("ready", flush=True)
peer = listener.accept()[0].makefile("rw")
for line in peer:
    print(line.strip(), flush=True)
    peer.write(line)
    peer.flush()
print("closed", flush=True)
"""
TALK = """
import socket, sys, threading
sys.stdin.readline()
peer = socket.create_connection((sys.argv[1], int(sys.argv[2]))).makefile("rw")
threading.Thread(target=lambda: [print(line.strip(), flush=True) for line in peer], daemon=True).start()
for line in sys.stdin:
    peer.write(line)
    peer.flush()
"""


class Process:
    """A script on a host, its lines in and out."""

    def __init__(self, network: Network, host: str, script: str, *args: str) -> None:
        command = network.command(host, [sys.executable, "-I", "-c", script, *args])
        self.popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent
        )
        network.started(host, self.popen.pid)
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self._lines.put(line.strip())

    def say(self, line: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(f"{line}\n")
        self.popen.stdin.flush()

    def hears(self, line: str) -> bool:
        return self._lines.get(timeout=ANSWER_S) == line

    def hears_nothing(self) -> bool:
        try:
            self._lines.get(timeout=SILENCE_S)
        except queue.Empty:
            return self.popen.poll() is None
        return False

    def end(self) -> None:
        self.popen.kill()
        self.popen.wait()
        self._reader.join()
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.popen.stdin.close()
        self.popen.stdout.close()


@contextmanager
def conversation(network: Network) -> Iterator[tuple[Process, Process]]:
    """A client on a, connected to a server on b that repeats what it hears."""
    port = free_port()
    server = Process(network, "b", ECHO, network.address("b"), str(port))
    processes = [server]
    try:
        assert server.hears("ready")
        client = Process(network, "a", TALK, *network.reach("b", port).split(":"))
        processes.append(client)
        client.say("connect")
        client.say("first")
        assert server.hears("first") and client.hears("first")
        yield client, server
    finally:
        for process in processes:
            process.end()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_sent_into_a_cut_arrives_after_the_heal(way: str) -> None:
    with open_network(way, ["a", "b", "c"]) as network, conversation(network) as (client, server):
        network.partition("a", "c")
        client.say("not cut")
        assert server.hears("not cut") and client.hears("not cut")
        network.partition("a", "b")
        client.say("cut")
        assert server.hears_nothing() and client.hears_nothing()
        network.heal("a", "b")
        assert server.hears("cut") and client.hears("cut")


@pytest.mark.parametrize("way", WAYS)
def test_a_cut_of_one_direction_loses_only_the_answers(way: str) -> None:
    with open_network(way, ["a", "b"]) as network, conversation(network) as (client, server):
        network.cut("b", "a")
        client.say("heard")
        assert server.hears("heard") and client.hears_nothing()
        network.mend("b", "a")
        assert client.hears("heard")


@pytest.mark.parametrize("way", WAYS)
def test_a_cut_hides_that_a_peer_died(way: str) -> None:
    with open_network(way, ["a", "b"]) as network, conversation(network) as (client, server):
        network.partition("a", "b")
        client.popen.send_signal(signal.SIGKILL)
        client.popen.wait()
        assert server.hears_nothing()


@pytest.mark.parametrize("way", [way for way in WAYS if way == NamespaceNetwork.way])
def test_processes_share_memory_inside_a_host_only(way: str) -> None:
    script = "from gpu_worker.transfer.host_id import host_id; print(host_id())"

    def host_id_on(host: str) -> str:
        command = network.command(host, [sys.executable, "-c", script])
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=ANSWER_S).stdout.strip()

    with open_network(way, ["a", "b"]) as network:
        ids = [host_id_on(host) for host in ("a", "a", "b")] + [host_id()]
    assert ids[0] == ids[1] and len(set(ids)) == 3


KILLED = """
import sys, time
from tests.mesh.namespaces import NamespaceNetwork
from tests.mesh.test_network import Process
with NamespaceNetwork(["a"]) as network:
    service = Process(network, "a", "import time; time.sleep(600)")
    print(service.popen.pid, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("way", [way for way in WAYS if way == NamespaceNetwork.way])
def test_a_killed_test_takes_its_services_along_and_its_network_goes_with_the_next(way: str) -> None:
    def namespaces_of(pid: int) -> list[str]:
        return [path.name for path in NAMESPACES.iterdir() if path.name.startswith(f"phasemesh-{pid}-")]

    killed = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    with killed.stdout:
        service_pid = int(killed.stdout.readline())
    service = os.pidfd_open(service_pid)
    try:
        remove_leftovers()
        assert len(namespaces_of(killed.pid)) == 2, "it lives: host a and the switch stay"
        killed.kill()
        killed.wait()
        assert select.select([service], [], [], ANSWER_S)[0], "the service lives on"
    finally:
        os.close(service)
    remove_leftovers()
    assert namespaces_of(killed.pid) == []
