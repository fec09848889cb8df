"""A neighbour is asked by gRPC once, and then through a socket of its own, for as long as it has an offer there."""

from __future__ import annotations

import errno
import os
import socket
import threading

import pytest

from gpu_worker.transfer import nearby
from gpu_worker.transfer.source import Context, TransferSource
from gpu_worker.transfer.transports import SHM
from tests.redis_fixture import free_port
from tests.transfer.peers import EXPECTED, HASHES, PROMPT, peer, two_peers
from tests.transfer.test_ends import SHORT_LEASE_MS
from tests.transfer.test_reuse import MOVED, OTHER, Between
from tests.worker.test_executor import TIMEOUT_S
from wire import transfer_pb2 as pb
from wire.ids import Epoch


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many units each ask by gRPC was for."""
    asked: list[int] = []
    pull = TransferSource.Pull

    async def counted(self: TransferSource, request: pb.PullRequest, context: Context) -> None:
        asked.append(len(request.unit_hashes))
        await pull(self, request, context)

    monkeypatch.setattr(TransferSource, "Pull", counted)
    return asked


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Answers through sockets wait for it."""
    gate = threading.Event()
    answer = TransferSource._answer

    def gated(self: TransferSource, raw: bytes) -> bytes | None:
        assert gate.wait(TIMEOUT_S)
        return answer(self, raw)

    monkeypatch.setattr(TransferSource, "_answer", gated)
    return gate


async def test_a_neighbour_is_asked_by_grpc_once(asked: list[int]) -> None:
    async with two_peers() as (source, target):
        await source.compute()
        for first_page in (0, 20, 40):
            [report] = await target.pull(target.pull_from(source, first_page=first_page))
            assert (report.num_units, report.failure, report.transport) == (8, None, SHM)
            assert report.num_bytes == 8 * source.worker.unit_bytes
            assert await target.continue_from(128, first_page=first_page) == EXPECTED
        assert asked == [8]
    assert "kv-asks" not in [thread.name for thread in threading.enumerate()]


async def test_pulls_at_once_are_asked_for_at_once(asked: list[int]) -> None:
    async with two_peers() as (source, target):
        await source.compute()
        await target.pull(target.pull_from(source))
        pulls = [target.pull_from(source, HASHES[i : i + 3], first_page=10 + 3 * i) for i in range(6)]
        assert [report.num_units for report in await target.pull(*pulls)] == [3] * 6
        assert asked == [8]


async def test_what_a_neighbour_has_not_whole_it_says_by_grpc(asked: list[int]) -> None:
    async with two_peers() as (source, target):
        await source.compute(PROMPT[:50])
        await target.pull(target.pull_from(source, HASHES[:3]))
        [report] = await target.pull(target.pull_from(source, first_page=20))
        assert (report.num_units, report.failure) == (3, "the source has 3 of 8 units")
        stale = target.pull_from(source, HASHES[:3], first_page=30)
        stale.source_epoch = Epoch(99)
        [report] = await target.pull(stale)
        assert (report.failure or "").endswith("FAILED_PRECONDITION: source_epoch: 99 asked for, it is 100 now")
        assert asked == [3, 8, 3]


async def test_a_page_that_gets_a_new_owner_fails_a_pull_asked_for_nearby(asked: list[int]) -> None:
    between = Between(1)
    async with two_peers(after_copy=between) as (source, target):
        await source.compute()
        await target.pull(target.pull_from(source, first_page=20))
        between.action = lambda: source.compute(OTHER[:16], seq=9, first_page=7)
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, (report.failure or "").endswith(MOVED)) == (0, True)
        assert asked == [8]


async def test_a_source_that_came_back_at_its_old_address_is_asked_anew(asked: list[int]) -> None:
    port = free_port()
    async with peer(worker_id="target") as target:
        for first_page in (0, 20):
            async with peer(worker_id="source", port=port) as source:
                await source.compute()
                for page in (first_page, first_page + 10):
                    [report] = await target.pull(target.pull_from(source, first_page=page))
                    assert (report.num_units, report.failure, report.transport) == (8, None, SHM)
        assert asked == [8, 8]


async def test_a_worker_of_another_user_gets_no_answer(asked: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearby, "_uid", lambda connection: -2)
    async with two_peers() as (source, target):
        await source.compute()
        for first_page in (0, 20):
            [report] = await target.pull(target.pull_from(source, first_page=first_page))
            assert (report.num_units, report.failure) == (8, None)
        assert asked == [8, 8]


async def test_a_request_that_is_too_long_for_a_message_is_made_by_grpc(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_peers() as (source, target):
        await source.compute()
        await target.pull(target.pull_from(source))
        await target.pull(target.pull_from(source, HASHES[:3], first_page=10))
        with monkeypatch.context() as short:
            short.setattr(nearby, "MAX_MESSAGE_BYTES", 100)
            [report] = await target.pull(target.pull_from(source, first_page=20))
        assert (report.num_units, report.failure) == (8, None)
        [report] = await target.pull(target.pull_from(source, first_page=30))
        assert (report.num_units, report.failure) == (8, None)
        assert asked == [8, 8]


async def test_where_there_are_no_such_sockets_a_neighbour_is_asked_by_grpc(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: socket.socket, address: object) -> None:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(socket.socket, "bind", refused)
    async with two_peers() as (source, target):
        await source.compute()
        for first_page in (0, 20):
            [report] = await target.pull(target.pull_from(source, first_page=first_page))
            assert (report.num_units, report.failure, report.transport) == (8, None, SHM)
        assert asked == [8, 8]


async def test_a_pull_that_waits_for_its_answer_can_be_cancelled(gate: threading.Event) -> None:
    async with two_peers() as (source, target):
        await source.compute()
        await target.pull(target.pull_from(source))
        pull = target.pull_from(source, first_page=20)
        await target.client.run(target.plan_of(pull))
        await target.client.run(target.plan_of(cancelled_pulls=[pull.pull_id]))
        assert (await target.client.pulled()).failure == "cancelled"
        gate.set()
        [report] = await target.pull(target.pull_from(source, first_page=30))
        assert (report.num_units, report.failure) == (8, None)


async def test_a_neighbour_that_does_not_answer_fails_the_pull_when_its_lease_is_over(gate: threading.Event) -> None:
    async with two_peers() as (source, target):
        await source.compute()
        await target.pull(target.pull_from(source))
        [report] = await target.pull(target.pull_from(source, first_page=20, lease_ms=SHORT_LEASE_MS))
        assert report.failure == f"the source was silent for lease_ms = {SHORT_LEASE_MS}"
        gate.set()


def test_a_worker_without_file_descriptors_pauses_before_it_accepts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    accept, num_failures = socket.socket.accept, 3

    def accept_late(self: socket.socket) -> tuple[socket.socket, object]:
        happened.append("accept")
        if len(happened) > 2 * num_failures:
            return accept(self)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    class Pauses(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout == nearby.ACCEPT_RETRY_S
            happened.append("pause")
            return super().wait(timeout)

    monkeypatch.setattr(socket.socket, "accept", accept_late)
    server = nearby.AskServer(lambda request: b"offer")
    server._closing = Pauses()
    with nearby._connect(server.name) as neighbour:
        neighbour.send(b"ask")
        assert neighbour.recv(100) == b"\1offer"
    server.close()
    assert happened == [*["accept", "pause"] * num_failures, "accept"]


def test_an_ask_that_fails_ends_its_connection_and_no_other() -> None:
    def answer(request: bytes) -> bytes | None:
        if request == b"bad":
            raise RuntimeError("no such ask")
        return {b"small": b"offer", b"large": bytes(nearby.MAX_MESSAGE_BYTES)}.get(request)

    server = nearby.AskServer(answer)
    with nearby._connect(server.name) as first, nearby._connect(server.name) as second:
        for request, reply in ((b"small", b"\1offer"), (b"large", b"\0"), (b"unknown", b"\0"), (b"bad", b"")):
            first.send(request)
            assert first.recv(100) == reply
        second.send(b"small")
        assert second.recv(100) == b"\1offer"
        server.close()
        assert second.recv(100) == b""
