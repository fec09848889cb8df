"""Fixtures of the whole-mesh suites."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.mesh.stack import MeshStack


@pytest.fixture
def stack(tmp_path: Path, smollm2_dir: Path) -> Iterator[MeshStack]:
    """One worker, default settings."""
    with MeshStack(smollm2_dir, tmp_path) as stack:
        yield stack


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def eventually(what: str, holds: object, timeout_s: float = 10.0) -> None:
    """Poll a condition (a callable, maybe blocking) until it holds."""
    assert callable(holds)
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not await asyncio.to_thread(holds):
        assert asyncio.get_running_loop().time() < deadline_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)
