"""A mesh whose services are spread over hosts that a test can part from each other.

    @pytest.mark.parametrize("way", WAYS[:1])               # the most real hosts this machine has, as part of the id
    def test_…(way, smollm2_dir, tmp_path):
        with open_network(way, ["a", "b", "c"]) as network:
            workers = {"b": {"KV_PAGES": "64"}, "c": {}}    # a worker on each, with environment of its own
            with HostedStack(network, smollm2_dir, tmp_path, front="a", workers=workers, env={…}) as stack:
                network.partition("b", "c")                 # nothing is closed, nothing arrives; cut() is one way
                stack.worker("b").kill()                    # -9; start() begins it anew
                network.heal("b", "c")
                stack.wait_at_rest()                        # every worker up, no page in use or retiring

Where hosts are loopback addresses, workers share memory, and KV may go from one to another past a cut.
A test process that is killed takes its services with it; its network goes when the next one starts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.mesh.namespaces import NamespaceNetwork, why_not_allowed
from tests.mesh.network import Network
from tests.mesh.relays import LoopbackNetwork
from tests.mesh.stack import Service, ServiceGroup
from tests.redis_fixture import Place, RedisServer, free_port

WAYS: tuple[str, ...] = (LoopbackNetwork.way,) if why_not_allowed() else (NamespaceNetwork.way, LoopbackNetwork.way)
"""Ways to make hosts here, the most real one first."""
SAMPLED_S = 0.6
"""A scheduler's gauges are never older (scheduler.cell_card.PUBLISH_S, and a margin)."""
PAGES = "phasemesh_scheduler_kv_pages"


def open_network(way: str, hosts: Sequence[str]) -> NamespaceNetwork | LoopbackNetwork:
    """A network of hosts, to be entered. way: one of WAYS."""
    return NamespaceNetwork(hosts) if way == NamespaceNetwork.way else LoopbackNetwork(hosts)


class _OnHost(Place):
    def __init__(self, network: Network, host: str) -> None:
        self.address = network.address(host)
        self._network = network
        self._host = host

    def command(self, command: Sequence[str]) -> list[str]:
        return self._network.command(self._host, command)

    def started(self, pid: int) -> None:
        self._network.started(self._host, pid)


class HostedStack(ServiceGroup):
    """A worker on each of some hosts, named after it; Redis, scheduler and gateway on `front`, or each where it says.

    `env` reaches every service, `workers` the one worker, e.g. {"b": {"KV_PAGES": "64"}}.
    """

    def __init__(
        self,
        network: Network,
        model_dir: Path,
        directory: Path,
        *,
        front: str,
        workers: Mapping[str, Mapping[str, str]],
        redis: str | None = None,
        scheduler: str | None = None,
        gateway: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.network = network
        self._directory = directory
        self.redis = RedisServer(directory, append_only=True, place=_OnHost(network, redis or front))
        self._common = {
            "REDIS_URL": f"redis://{network.reach(redis or front, self.redis.port)}/0",
            "MODEL": str(model_dir),
            "MODEL_NAME": "m",
            **(env or {}),
        }
        self.scheduler = self.another_scheduler("scheduler", scheduler or front)
        self.workers = [self._worker(host, own) for host, own in workers.items()]
        self.gateway = self._gateway(gateway or front)
        self.url = self.gateway.health_url.removesuffix("/health")

    def worker(self, host: str) -> Service:
        return next(worker for worker in self.workers if worker.name == host)

    def another_scheduler(self, name: str, host: str) -> Service:
        """Not started, and to be stopped by who asked for it: a standby, say."""
        address, port = self.network.address(host), free_port()
        own = {"SCHEDULER_HOST": address, "SCHEDULER_PORT": str(port), "SCHEDULER_ID": name}
        return self._service(name, "scheduler", host, own, port)

    def _worker(self, host: str, own: Mapping[str, str]) -> Service:
        address, port, health_port = self.network.address(host), free_port(), free_port()
        environment = {
            "WORKER_ID": host,
            "WORKER_HOST": address,
            "WORKER_PORT": str(port),
            "WORKER_ADVERTISE_ADDRESS": self.network.reach(host, port),
            "WORKER_HEALTH_HOST": address,
            "WORKER_HEALTH_PORT": str(health_port),
            "WORKER_THREADS": "1",
            **own,
        }
        return self._service(host, "gpu_worker", host, environment, health_port)

    def _gateway(self, host: str) -> Service:
        address, port = self.network.address(host), free_port()
        own = {"HOST": address, "PORT": str(port), "GATEWAY_ID": "gw"}
        return self._service("gateway", "gateway", host, own, port)

    def _service(self, name: str, module: str, host: str, own: Mapping[str, str], health_port: int) -> Service:
        environment = {f"PHASEMESH_{k}": v for k, v in (self._common | dict(own)).items()}
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
        health_url = f"http://{self.network.address(host)}:{health_port}/health"
        log = self._directory / f"{name}.log"
        return Service(name, module, environment, health_url, log, _OnHost(self.network, host))

    def wait_at_rest(self, timeout_s: float = 30.0, *, scheduler: Service | None = None) -> None:
        """Until the (active) scheduler knows every worker and none holds a page for a request."""
        wait_pools_at_rest(scheduler or self.scheduler, [worker.name for worker in self.workers], timeout_s)


def held_pages(service: Service, metric: str = PAGES) -> dict[str, int]:
    """Pages in use or retiring of each worker that a service's /metrics know."""
    held: dict[str, int] = {}
    for labels, value in service.samples(metric).items():
        label = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        counts = label["state"] in ("in_use", "retiring")
        held[label["worker"]] = held.get(label["worker"], 0) + (int(value) if counts else 0)
    return held


def wait_pools_at_rest(service: Service, workers: Sequence[str], timeout_s: float) -> None:
    """Until a service's metrics show these workers and no others, without a page in use or retiring, for as long as
    the metrics may be old."""
    deadline_s = time.monotonic() + timeout_s
    rest_since_s: float | None = None
    while rest_since_s is None or time.monotonic() - rest_since_s < SAMPLED_S:
        held = held_pages(service)
        if held != dict.fromkeys(workers, 0):
            rest_since_s = None
        elif rest_since_s is None:
            rest_since_s = time.monotonic()
        assert time.monotonic() < deadline_s, f"after {timeout_s:g} s {service.name} counts pages held: {held}"
        time.sleep(0.05)
