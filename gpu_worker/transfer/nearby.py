"""Asking a neighbour on this host: a Unix socket straight to a thread of the source's, without gRPC's many hands.

Whether it is asked here or by gRPC, the offer is the same one. Here all is offered, in pages, or nothing: whatever else
there is to say (units below the pages, a refusal by name), gRPC says.

    puller ── PullRequest ──▸ source        one message each way, on a connection that is kept
           ◂── Offer | nothing ──
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable

from gpu_worker.transfer.pull import Pull, PullOver

log = logging.getLogger("gpu_worker.transfer.nearby")

MAX_MESSAGE_BYTES = 128 << 10
"""A longer request, or offer, goes by gRPC: some 3,000 units."""
MAX_NEIGHBOURS = 32
"""Whose sockets a worker remembers. It keeps a connection to each for every pull it ever made from it at once."""
ACCEPT_RETRY_S = 0.01
"""After a caller could not be accepted for want of file descriptors: it goes on waiting, and would be tried at once."""
_ANSWER = b"\1"  # before an offer: a message without bytes is the end of a connection
_NOTHING = b"\0"
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class AskServer:
    """Answers neighbours of the same user, in a thread of its own, until it is closed."""

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        """answer: to a request; None: ask by gRPC. Raises OSError where there are no such sockets."""
        self._answer = answer
        self.name = f"phasemesh-kv-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(f"\0{self.name}")
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="kv-asks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as ready:
            ready.register(self._listener, selectors.EVENT_READ)
            while True:
                events = ready.select()
                if self._closing.is_set():
                    break
                for key, _ in events:
                    if key.data is None:
                        self._accept(ready)
                    else:
                        self._reply(ready, key.data)
            for key in ready.get_map().values():
                if key.data is not None:
                    key.data.close()

    def _accept(self, ready: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # whoever called has gone
            return
        except OSError:
            self._closing.wait(ACCEPT_RETRY_S)
            return
        if _uid(connection) != os.geteuid():
            connection.close()
            return
        connection.setblocking(False)
        ready.register(connection, selectors.EVENT_READ, connection)

    def _reply(self, ready: selectors.BaseSelector, connection: socket.socket) -> None:
        try:
            request = connection.recv(MAX_MESSAGE_BYTES)
            if request:
                offer = self._answer(request)
                connection.send(_NOTHING if offer is None or len(offer) >= MAX_MESSAGE_BYTES else _ANSWER + offer)
                return
        except OSError:  # gone, or it does not read what it asked for
            pass
        except Exception:  # whatever was asked: others are answered still, and this one asks by gRPC
            log.exception("an ask failed")
        ready.unregister(connection)
        connection.close()


class Neighbours:
    """Sources that said where they can be asked, by their addresses. Used by all pulls' threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        self._idle: dict[str, list[socket.socket]] = {}

    def learn(self, address: str, name: str) -> None:
        """A source's offer came with the name of its socket."""
        with self._lock:
            if name and self._names.get(address) != name:
                self._forget(address)
                while len(self._names) >= MAX_NEIGHBOURS:
                    self._forget(next(iter(self._names)))
                self._names[address] = name

    def ask(self, pull: Pull, request: bytes) -> bytes | None:
        """Its offer; None: it is to be asked by gRPC. Raises PullOver when the pull was ended meanwhile."""
        if len(request) > MAX_MESSAGE_BYTES:
            return None
        address = pull.request.source_address
        with self._lock:
            name = self._names.get(address)
            idle = self._idle.get(address)
            connection = idle.pop() if idle else None
        if name is None:
            return None
        try:
            connection = connection or _connect(name)
            reply = _asked(connection, pull, request)
        except (OSError, PullOver) as error:
            if connection is not None:
                connection.close()
            if isinstance(error, PullOver):
                raise
            with self._lock:  # the source is gone, or the pull is over, as its next step will find
                self._forget(address)
            return None
        with self._lock:
            if self._names.get(address) == name:
                self._idle.setdefault(address, []).append(connection)
            else:
                connection.close()
        return reply[1:] if reply[:1] == _ANSWER else None

    def close(self) -> None:
        with self._lock:
            for address in list(self._names):
                self._forget(address)

    def _forget(self, address: str) -> None:
        self._names.pop(address, None)
        for connection in self._idle.pop(address, []):
            connection.close()


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"\0{name}")
    except OSError:
        connection.close()
        raise
    return connection


def _asked(connection: socket.socket, pull: Pull, request: bytes) -> bytes:
    """The answer to one request. Whoever ends the pull meanwhile ends the connection."""

    def interrupt() -> None:
        with contextlib.suppress(OSError):  # no longer connected
            connection.shutdown(socket.SHUT_RDWR)

    pull.on_end(interrupt)
    connection.send(request)
    reply = connection.recv(MAX_MESSAGE_BYTES)
    if not reply:
        raise ConnectionResetError("the source closed it")
    pull.on_end(lambda: None)
    return reply


def _uid(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
