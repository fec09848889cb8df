"""Fixtures of the worker's tests."""

from tests.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]
