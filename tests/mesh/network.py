"""What a test needs of hosts: addresses, processes on them, and links to cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self


class Network(ABC):
    """Hosts with addresses of their own, all of which the test process reaches whatever is cut.

    A context manager: nothing is left of it afterwards.
    """

    way: str
    """How the hosts are made, for test ids."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self.hosts = tuple(hosts)

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def address(self, host: str) -> str:
        """Its IPv4 address, for servers there to bind."""

    @abstractmethod
    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """What runs a command there, as the very process that is started."""

    @abstractmethod
    def started(self, host: str, pid: int) -> None:
        """A process runs there now: to be said before it connects anywhere."""

    @abstractmethod
    def reach(self, host: str, port: int) -> str:
        """host:port at which every host reaches a server that listens on a port there."""

    @abstractmethod
    def cut(self, source: str, target: str) -> None:
        """Lose all that source sends to target from now on, silently: nothing is closed or refused."""

    @abstractmethod
    def mend(self, source: str, target: str) -> None:
        """The opposite; does nothing where nothing is cut."""

    def partition(self, a: str, b: str) -> None:
        """Cut both directions."""
        self.cut(a, b)
        self.cut(b, a)

    def heal(self, a: str, b: str) -> None:
        self.mend(a, b)
        self.mend(b, a)

    def heal_all(self) -> None:
        for source in self.hosts:
            for target in self.hosts:
                if source != target:
                    self.mend(source, target)
