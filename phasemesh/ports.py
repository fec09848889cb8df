"""Free and busy loopback ports."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

from wire.errors import ConfigInvalid

_FIRST_PORT = 10_000
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_FIRST = 32_768
"""Linux's default, where /proc does not say."""


def is_free(host: str, port: int) -> bool:
    """Whether a server could bind host:port now. Raises OSError when the address itself is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            s.bind((host, port))
            s.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def free_port(taken: set[int], host: str = "127.0.0.1") -> int:
    """A free port, added to `taken`, that will still be free when its server restarts.

    Below the ephemeral range: from it, the kernel may give a server's port to somebody's outgoing connection
    while the server is down, even to a client that keeps trying to reach it (which then talks to itself).
    """
    first = _EPHEMERAL_FIRST
    if _EPHEMERAL_RANGE.exists():
        first = int(_EPHEMERAL_RANGE.read_text().split()[0])
    low, high = (_FIRST_PORT, first) if first > _FIRST_PORT + 1000 else (first, 65_536)
    candidates = random.sample(range(low, high), k=200)
    for port in candidates:
        if port not in taken and is_free(host, port):
            taken.add(port)
            return port
    raise ConfigInvalid(f"no free port on {host} between {low} and {high}")


def require_free(host: str, port: int, variable: str, choose_with: str) -> None:
    """Raise ConfigInvalid, saying what to do, when host:port, which `variable` sets, is busy or cannot be bound."""
    try:
        free = is_free(host, port)
    except OSError as error:
        raise ConfigInvalid(f"cannot listen on {host}:{port}: {error.strerror}", param=variable) from error
    if not free:
        raise ConfigInvalid(f"port {port} on {host} is in use; choose another with {choose_with}", param=variable)
