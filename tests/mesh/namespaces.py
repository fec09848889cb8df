"""Hosts as network namespaces: a kernel of their own as far as TCP can tell, joined by veth pairs and one bridge.

    host a ── eth0 ═ veth ═ port0 ─┐
    host b ── eth0 ═ veth ═ port1 ─┤ br0, in a namespace of its own: no firewall rule of this machine sees our packets
    the test ─ pm… ═ veth ═ outside┘

A host has a boot id of its own too: workers of two hosts share no memory (gpu_worker/transfer/host_id.py).

Hosts reach each other by permanent neighbour entries. To cut one direction, the sender's entry of the other names a
station that no port of the bridge has: packets leave and are lost, no error, no RST, no FIN, no ICMP.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path
from types import TracebackType

from tests.mesh.network import Network

NAMESPACES = Path("/run/netns")
_OURS = re.compile(r"phasemesh-(?P<pid>\d+)-\d+-")
_NOWHERE = "02:00:00:00:00:00"
"""A locally administered address of nobody."""
_SUBNETS = 8192
"""Of 14 hosts each, in 198.18.0.0/15, which is reserved for tests of networks (RFC 2544)."""
MAX_HOSTS = 13
_COMMAND_TIMEOUT_S = 10.0
_BOOT_AND_RUN = """
mount -t tmpfs boot /mnt && echo "$0" > /mnt/boot_id &&
mount --bind /mnt/boot_id /proc/sys/kernel/random/boot_id && exec "$@"
"""
"""`ip netns exec` gives every process a mount namespace of its own, so nobody else sees these mounts."""
_numbers = count()


class NamespaceNetwork(Network):
    """`with NamespaceNetwork(["a", "b"]) as network: …`"""

    way = "namespaces"

    def __init__(self, hosts: Sequence[str]) -> None:
        assert len(hosts) <= MAX_HOSTS, f"{len(hosts)} hosts, a subnet has {MAX_HOSTS}"
        super().__init__(hosts)
        number = next(_numbers)
        self._prefix = f"phasemesh-{os.getpid()}-{number}-"
        self._switch = f"{self._prefix}switch"
        self._outside = f"pm{os.getpid()}n{number}"  # at most 15 characters
        self._subnet = 0
        self._cut: set[tuple[str, str]] = set()

    # -- the network as its hosts see it ---------------------------------------------------------------------------

    def address(self, host: str) -> str:
        return self._address(2 + self.hosts.index(host))

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        namespace = self._prefix + host
        return ["ip", "netns", "exec", namespace, "sh", "-c", _BOOT_AND_RUN, namespace, *command]

    def started(self, host: str, pid: int) -> None:
        """A process is where its namespace is."""

    def reach(self, host: str, port: int) -> str:
        return f"{self.address(host)}:{port}"

    def cut(self, source: str, target: str) -> None:
        self._cut.add((source, target))
        self._set_neighbour(source, target)

    def mend(self, source: str, target: str) -> None:
        if (source, target) in self._cut:
            self._cut.remove((source, target))
            self._set_neighbour(source, target)

    # -- made and unmade -------------------------------------------------------------------------------------------

    def __enter__(self) -> NamespaceNetwork:
        remove_leftovers()
        try:
            self._create()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _remove(self._prefix, self._outside)

    def _create(self) -> None:
        self._subnet = _free_subnet()
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        _ip("link", "add", self._outside, "type", "veth", "peer", "name", "outside", "netns", self._switch)
        _ip("-n", self._switch, "link", "set", "outside", "master", "br0", "up")
        _ip("addr", "add", f"{self._address(1)}/28", "dev", self._outside)
        _ip("link", "set", self._outside, "up")
        for number, host in enumerate(self.hosts):
            self._add_host(number, self._prefix + host)
        for source in self.hosts:
            for target in self.hosts:
                if source != target:
                    self._set_neighbour(source, target)

    def _add_host(self, number: int, namespace: str) -> None:
        port = f"port{number}"
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("link", "add", "eth0", "netns", namespace, "type", "veth", "peer", "name", port, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", namespace, "link", "set", "eth0", "address", _station(number))
        _ip("-n", namespace, "addr", "add", f"{self._address(2 + number)}/28", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")

    def _set_neighbour(self, source: str, target: str) -> None:
        station = _NOWHERE if (source, target) in self._cut else _station(self.hosts.index(target))
        entry = (self.address(target), "lladdr", station, "nud", "permanent", "dev", "eth0")
        _ip("-n", self._prefix + source, "neigh", "replace", *entry)

    def _address(self, number: int) -> str:
        return _subnet_address(self._subnet, number)


def why_not_allowed() -> str | None:
    """Why this machine gives us no namespaces; None when it does."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None:
        return "no ip command (iproute2)"
    try:
        with NamespaceNetwork(["a"]) as network:
            _run(network.command("a", ["true"]))
            return None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return str(error.stderr or error)


def remove_leftovers() -> None:
    """Remove the networks of test processes that are gone: killed ones could not do it themselves."""
    for pid, number in {(int(m["pid"]), m[0]) for m in map(_OURS.match, _namespaces()) if m}:
        if not Path(f"/proc/{pid}").exists():
            _remove(number, f"pm{pid}n{number.split('-')[2]}")


def _remove(prefix: str, outside: str) -> None:
    """Remove one network, as far as it was made. A service that still runs keeps its own namespace until it ends."""
    if Path(f"/sys/class/net/{outside}").exists():
        _ip("link", "del", outside)
    for namespace in _namespaces():
        if namespace.startswith(prefix):
            _ip("netns", "del", namespace)


def _namespaces() -> list[str]:
    return [path.name for path in NAMESPACES.iterdir()] if NAMESPACES.exists() else []


def _free_subnet() -> int:
    """One that no interface of this machine is in, starting from one of our process's own."""
    used = _ip("-4", "-o", "addr", "show")
    start = os.getpid() % _SUBNETS
    for subnet in chain(range(start, _SUBNETS), range(start)):
        if f" {_subnet_address(subnet, 1)}/" not in used:
            return subnet
    raise AssertionError("198.18.0.0/15 is full")


def _subnet_address(subnet: int, number: int) -> str:
    host_bits = subnet * 16 + number
    return f"198.{18 + (host_bits >> 16)}.{host_bits >> 8 & 255}.{host_bits & 255}"


def _station(number: int) -> str:
    return f"02:00:00:00:01:{number:02x}"


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _run(command: Sequence[str]) -> str:
    """Its output. Raises CalledProcessError, whose stderr says why, or TimeoutExpired."""
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    return done.stdout
