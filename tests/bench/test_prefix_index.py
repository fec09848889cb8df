"""bench.prefix_index measures what it says, and leaves nothing in Redis."""

from __future__ import annotations

import sys

import pytest
from redis import Redis

from bench import prefix_index
from tests.redis_fixture import redis_url

__all__ = ["redis_url"]


def test_every_figure_is_printed_and_nothing_stays(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--workers", "3", "--units", "100", "--chain", "40", "--lookups", "8"]
    monkeypatch.setattr(sys, "argv", ["prefix_index", "--redis-url", redis_url, *small])
    monkeypatch.setattr(prefix_index, "calm_collector", lambda: None)  # of this process, for good
    prefix_index.main()
    printed = capsys.readouterr().out
    for figure in ("twin  ", "Redis, by script", "Redis, by pipelines", "bytes per unit of a worker (MEMORY USAGE)"):
        assert printed.count(figure) >= 2, figure
    with Redis.from_url(redis_url) as client:
        assert not client.keys(f"{{{prefix_index.CELL}}}*")


def test_a_chain_longer_than_what_is_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["prefix_index", "--units", "10"])
    with pytest.raises(SystemExit):
        prefix_index.main()
