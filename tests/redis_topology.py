"""Real Sentinels and a real Cluster, of redis-servers of their own on free ports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from redis import Redis
from redis.exceptions import ResponseError

from tests.redis_fixture import RedisServer, free_port, running

TIMEOUT_S = 20.0
SLOTS = 16384
SERVICE = "mesh"


def until(what: str, condition: Any) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {TIMEOUT_S} s"
        time.sleep(0.02)


class Watched:
    """A master with one replica, watched by a Sentinel."""

    def __init__(self, master: RedisServer, replica: RedisServer, sentinel: RedisServer) -> None:
        self.master = master
        self.replica = replica
        self._sentinel = sentinel
        self.url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{sentinel.port}/{SERVICE}/0"  # one is down

    def fail_over(self) -> None:
        """The replica becomes the master, on command; returns when the Sentinel says so and the old one follows it."""
        with Redis(port=self._sentinel.port) as sentinel, Redis(port=self.master.port) as old:
            until("a replica that it knows well enough to promote", lambda: self._begin_failover(sentinel))
            until("failover", lambda: self._named(sentinel) == self.replica.port)
            until("old master demoted", lambda: old.info("replication")["role"] == "slave")
        self.master, self.replica = self.replica, self.master

    @staticmethod
    def _begin_failover(sentinel: Redis) -> bool:
        with suppress(ResponseError):
            sentinel.sentinel_failover(SERVICE)
            return True
        return False

    @staticmethod
    def _named(sentinel: Redis) -> int:
        answer: Any = sentinel.sentinel_get_master_addr_by_name(SERVICE)
        return int(answer[1])


@contextmanager
def watched(directory: Path) -> Iterator[Watched]:
    """A Sentinel writes its configuration file itself, so it gets one."""
    with ExitStack() as stack:
        master = stack.enter_context(running(_server(directory / "master")))
        following = {"replicaof": f"127.0.0.1 {master.port}", "repl-diskless-sync-delay": "0"}
        replica = stack.enter_context(running(_server(directory / "replica", **following)))
        sentinel = stack.enter_context(running(_Sentinel(directory / "sentinel", master)))
        with Redis(port=replica.port) as client:
            until("replica in step", lambda: client.info("replication")["master_link_status"] == "up")
        yield Watched(master, replica, sentinel)


class _Sentinel(RedisServer):
    def __init__(self, directory: Path, master: RedisServer) -> None:
        directory.mkdir()
        super().__init__(directory)
        self._config = directory / "sentinel.conf"
        self._config.write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {directory}\n"
            f"sentinel monitor {SERVICE} 127.0.0.1 {master.port} 1\n"
            f"sentinel down-after-milliseconds {SERVICE} 1000\nsentinel failover-timeout {SERVICE} 5000\n"
        )

    def arguments(self) -> list[str]:
        return [str(self._config), "--sentinel"]


class Cluster:
    """Three masters; slots can be moved."""

    def __init__(self, nodes: list[RedisServer]) -> None:
        self.nodes = nodes
        self.url = "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)

    def move_slot(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """With all its keys."""
        with Redis(port=source.port) as old, Redis(port=target.port) as new:
            source_id, target_id = (node.execute_command("CLUSTER", "MYID").decode() for node in (old, new))
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
            found: Any = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 10_000)
            if found:
                old.migrate("127.0.0.1", target.port, found, 0, 5000)
            for client in (new, old):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target_id)

    def owner(self, slot: int) -> RedisServer:
        """By what the nodes say; they agree soon after a move."""
        with Redis(port=self.nodes[0].port) as client:
            ranges: Any = client.execute_command("CLUSTER", "SLOTS")
            [port] = [master[1] for first, last, master, *_ in _slots(ranges) if first <= slot <= last]
        return next(node for node in self.nodes if node.port == port)


def _slots(ranges: Any) -> list[Any]:
    """redis-py makes a dict of CLUSTER SLOTS where its client does."""
    if isinstance(ranges, dict):
        return [(first, last, entry["primary"]) for (first, last), entry in ranges.items()]
    return list(ranges)


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    options = {"cluster-enabled": "yes", "cluster-config-file": "nodes.conf", "cluster-node-timeout": "5000"}
    with ExitStack() as stack:
        nodes = [stack.enter_context(running(_server(directory / f"node{i}", **options))) for i in range(3)]
        clients = [stack.enter_context(Redis(port=node.port)) for node in nodes]
        for i, client in enumerate(clients):
            first, end = SLOTS * i // 3, SLOTS * (i + 1) // 3
            client.execute_command("CLUSTER", "ADDSLOTS", *range(first, end))
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", i + 1)
        for node in nodes[1:]:
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        for client in clients:
            until("cluster up", lambda client=client: _is_up(client))
        yield Cluster(nodes)


def _is_up(client: Any) -> bool:
    info = client.execute_command("CLUSTER", "INFO")
    text = str(info)
    return ("cluster_state:ok" in text or "'cluster_state': 'ok'" in text) and (
        "cluster_known_nodes:3" in text or "'cluster_known_nodes': '3'" in text
    )


def _server(directory: Path, **options: str) -> RedisServer:
    directory.mkdir()
    return RedisServer(directory, options=options)
