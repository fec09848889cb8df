"""Fixtures of the worker's tests."""

from tests.redis_fixture import durable_redis_server, redis_url

__all__ = ["durable_redis_server", "redis_url"]
