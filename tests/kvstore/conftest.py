"""Every kind of Redis that the prefix index may live in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.redis_fixture import redis_server, redis_url
from tests.redis_topology import Cluster, Watched, cluster, watched

__all__ = ["redis_server", "redis_url"]


@pytest.fixture(scope="module")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes that the module shares."""
    with cluster(tmp_path_factory.mktemp("cluster")) as three:
        yield three


@pytest.fixture(scope="module")
def redis_watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A watched master that the module shares."""
    with watched(tmp_path_factory.mktemp("sentinel")) as pair:
        yield pair
