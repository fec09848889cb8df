"""Fixtures of the transfer suite."""

from tests.redis_fixture import redis_url

__all__ = ["redis_url"]
