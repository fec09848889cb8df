"""Stands for the `nixl` package: its call shape, over memory of this process. Reads take two polls to be done."""

from __future__ import annotations

import ctypes
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest


class FakeTransfer:
    def __init__(self, pairs: list[tuple[tuple[int, int, int], tuple[int, int, int]]]) -> None:
        self.pairs = pairs
        self.polls_left = 2


class FakeAgent:
    agents: dict[str, FakeAgent] = {}  # noqa: RUF012  # as a registry of all there are

    def __init__(self, name: str, config: Any = None) -> None:
        self.name = name
        self.registered: list[tuple[int, int]] = []
        self.remotes: set[str] = set()
        self.live_transfers = 0
        self.agents[name] = self

    def register_memory(self, regions: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        assert mem_type == "DRAM"
        self.registered += [(address, size) for address, size, _, _ in regions]
        return list(self.registered)

    def deregister_memory(self, registered: Any) -> None:
        self.registered.clear()

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode()
        assert name in self.agents
        self.remotes.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.remotes.remove(name)

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], mem_type: str) -> Any:
        assert mem_type == "DRAM"
        return regions

    def initialize_xfer(self, operation: str, local: Any, remote: Any, remote_agent: str) -> FakeTransfer:
        assert operation == "READ" and remote_agent in self.remotes
        for descs, agent in ((local, self), (remote, self.agents[remote_agent])):
            for address, size, _ in descs:
                assert any(begin <= address and address + size <= begin + n for begin, n in agent.registered)
        self.live_transfers += 1
        return FakeTransfer(list(zip(local, remote, strict=True)))

    def transfer(self, handle: FakeTransfer) -> str:
        return "PROC"

    def check_xfer_state(self, handle: FakeTransfer) -> str:
        handle.polls_left -= 1
        if handle.polls_left:
            return "PROC"
        for (to, size, _), (source, source_size, _) in handle.pairs:
            assert size == source_size
            ctypes.memmove(to, source, size)
        return "DONE"

    def release_xfer_handle(self, handle: FakeTransfer) -> None:
        self.live_transfers -= 1


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `import nixl` find this."""
    package, api = ModuleType("nixl"), ModuleType("nixl._api")
    package.__spec__ = ModuleSpec("nixl", None)
    api.nixl_agent = FakeAgent  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", package)
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr(FakeAgent, "agents", {})
