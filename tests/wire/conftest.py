"""Fixtures of the wire tests."""

from tests.redis_fixture import redis_url

__all__ = ["redis_url"]
