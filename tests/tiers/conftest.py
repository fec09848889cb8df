"""Fixtures of the tiers' tests."""

from tests.redis_fixture import redis_server, redis_url

__all__ = ["redis_server", "redis_url"]
