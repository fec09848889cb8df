"""What PHASEMESH_REDIS_URL may say: one server, a master that Sentinels watch, or a Cluster.

    redis://  rediss://  unix://                                     one server, as redis-py reads it
    redis+sentinel://[user:password@]host:port,…/service[/db]        whichever server is the service's master
    redis+cluster://[user:password@]host:port,…                      the node that has the cell's slot

`rediss+…` speaks TLS to all of them. Options of redis-py's URLs may follow, as in `?ssl_ca_certs=…`; Sentinels have a
user of their own, `?sentinel_username=…&sentinel_password=…`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio.connection import parse_url

from wire.errors import ConfigInvalid

SENTINEL_PORT = 26379
REDIS_PORT = 6379

Address = tuple[str, int]


class Topology(StrEnum):
    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    topology: Topology
    options: dict[str, Any]
    """Of a connection, as redis-py's parse_url gives them; host and port only for one server."""
    nodes: tuple[Address, ...] = ()
    """Sentinels, or nodes of a Cluster: at least one is asked where to connect."""
    service: str = ""
    sentinel_options: dict[str, Any] = field(default_factory=dict)


def parse_redis_url(url: str) -> RedisUrl:
    """Raises ConfigInvalid, naming PHASEMESH_REDIS_URL and not the password."""
    parts = urlsplit(url)
    try:
        scheme, _, kind = parts.scheme.partition("+")
        if not kind:
            return RedisUrl(Topology.SERVER, dict(parse_url(url)))
        if scheme not in ("redis", "rediss") or kind not in (Topology.SENTINEL, Topology.CLUSTER):
            raise ValueError("the scheme is redis, rediss or unix, or redis or rediss with +sentinel or +cluster")
        return _parse_nodes(parts, scheme, Topology(kind))
    except ValueError as error:
        shown = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
        raise ConfigInvalid(f"PHASEMESH_REDIS_URL={shown!r}: {error}", param="PHASEMESH_REDIS_URL") from error


def _parse_nodes(parts: SplitResult, scheme: str, topology: Topology) -> RedisUrl:
    user, _, hosts = parts.netloc.rpartition("@")
    default_port = SENTINEL_PORT if topology is Topology.SENTINEL else REDIS_PORT
    nodes = tuple(_address(host, default_port) for host in hosts.split(","))
    path = [unquote(part) for part in parts.path.split("/") if part]
    service = ""
    if topology is Topology.SENTINEL:
        if not path:
            raise ValueError("the path names the service that the Sentinels watch: …/mymaster")
        service = path.pop(0)
    database = path.pop(0) if path else "0"
    if path or not database.isdigit():
        raise ValueError(f"path {parts.path!r}: at most one database number")
    if topology is Topology.CLUSTER and int(database):
        raise ValueError(f"database {database}: a Cluster has database 0 only")
    query = dict(parse_qsl(parts.query))
    sentinel = {name: query.pop(f"sentinel_{name}", None) for name in ("username", "password")}
    plain = f"{scheme}://{user}{'@' if user else ''}unused/{database}?{urlencode(query)}"
    options: dict[str, Any] = dict(parse_url(plain))
    del options["host"]
    return RedisUrl(topology, options, nodes, service, {name: v for name, v in sentinel.items() if v is not None})


def _address(text: str, default_port: int) -> Address:
    """`host`, `host:port` or `[v6]:port`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(default_port)
    if not host:
        raise ValueError(f"{text!r}: no host name")
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r}: the port is a number from 1 to 65535")
    return host.strip("[]"), int(port)
