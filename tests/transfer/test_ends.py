"""However a pull ends, it ends in one report, and from then on it writes to no page."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace

import pytest

from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.host_pages import HostPages
from gpu_worker.transfer.messages import encode_chunk
from gpu_worker.transfer.port import Bytes, KvFormat
from gpu_worker.transfer.puller import MAX_RUNNING
from gpu_worker.transfer.transports import GRPC, SHM
from tests.redis_fixture import free_port
from tests.transfer.peers import (
    EXPECTED,
    HASHES,
    PROMPT,
    peer,
    pull_from_address,
    two_peers,
)
from tests.worker.fake_runner import CARD, FakeRunner, reference_output
from tests.worker.fake_worker import LAYER_BYTES
from tests.worker.plans import chunk, grant, plan
from tests.worker.test_executor import TIMEOUT_S, Client, tokens_of
from wire.ids import Epoch, PageId

SHORT_LEASE_MS = 200


class LayerGate:
    """Holds a reading thread after one layer: `entered` says it is there, `leave` lets it go on."""

    def __init__(self, layer: int = 0) -> None:
        self._layer = layer
        self._entered = threading.Event()
        self._leave = threading.Event()

    def __call__(self, layer: int) -> None:
        if layer == self._layer:
            self._entered.set()
            assert self._leave.wait(TIMEOUT_S)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, TIMEOUT_S)

    def leave(self) -> None:
        self._leave.set()


@pytest.mark.parametrize("transport", [SHM, GRPC])
@pytest.mark.parametrize("how", ["replaced", "closed"])
async def test_a_session_that_ends_takes_its_pulls_with_it_before_the_next_begins(transport: str, how: str) -> None:
    gate = LayerGate()
    held = {"after_read": gate} if transport == GRPC else {}
    async with two_peers(
        source={"transports": (transport,), **held},
        transports=(transport,),
        after_copy=gate if transport == SHM else None,
    ) as (source, target):
        await source.compute()
        await target.client.run(target.plan_of(target.pull_from(source)))
        await gate.entered()
        executor = target.worker.executor
        if how == "closed":
            executor.close(target.client.channel)
        successor = Client(executor)
        assert (await successor.open()).residents == []
        # The pages have a new owner now; what the old pull's thread still does must not reach them.
        other = list(range(300, 428))
        whole = chunk(1, 0, 128, tokens=other, pages=grant(range(9), 140))
        reports = await successor.run(plan(1, chunks=[whole], max_steps=4))
        gate.leave()
        old = await target.client.pulled()
        assert (old.num_units, old.failure) == (0, "cancelled")
        again = chunk(2, 64, 64, tokens=other, pages=grant([0, 1, 2, 3, 20, 21, 22, 23, 24], 140))
        assert tokens_of(await successor.run(plan(2, chunks=[again], max_steps=4)), 2) == tokens_of(reports, 1)
        assert tokens_of(reports, 1) == reference_output(other, 4)


async def test_a_failed_step_ends_the_pulls_of_its_epoch() -> None:
    gate = LayerGate()
    async with two_peers(after_copy=gate) as (source, target):
        await source.compute()
        await target.client.run(target.plan_of(target.pull_from(source)))
        await gate.entered()

        def fail(batch: StepBatch) -> None:
            raise RuntimeError("device lost")

        target.worker.runner.before_forward = fail
        reports = await target.client.run(plan(9, chunks=[chunk(1, 0, 4, tokens=[1, 2, 3, 4], pages=grant([50], 16))]))
        assert reports[-1].failure == "RuntimeError: device lost"
        assert (await target.client.pulled()).failure == "cancelled"
        gate.leave()
        assert (await Client(target.worker.executor).open()).residents == []


async def test_a_cancelled_pull_reports_and_its_pages_can_be_used_at_once() -> None:
    gate = LayerGate(1)
    async with two_peers(after_copy=gate) as (source, target):
        await source.compute()
        pull = target.pull_from(source)
        await target.client.run(target.plan_of(pull))
        await gate.entered()
        whole = chunk(1, 0, 140, tokens=PROMPT, pages=grant(range(10), 156))
        reports = await target.client.run(plan(9, cancelled_pulls=[pull.pull_id, 77], chunks=[whole], max_steps=8))
        assert (await target.client.pulled()).failure == "cancelled"
        gate.leave()
        assert tokens_of(reports, 1) == EXPECTED


async def test_pulls_that_wait_for_their_turn_keep_their_leases_and_can_be_cancelled() -> None:
    gate = LayerGate()
    async with two_peers(after_copy=gate) as (source, target):
        await source.compute()
        running = [target.pull_from(source, HASHES[:1], first_page=i) for i in range(MAX_RUNNING)]
        waiting = [target.pull_from(source, HASHES[:1], first_page=30 + i, lease_ms=SHORT_LEASE_MS) for i in range(2)]
        await target.client.run(target.plan_of(*running, *waiting))
        await gate.entered()
        renewed = [await target.client.pull_report() for _ in range(4)]
        assert {(r.pull_id, r.done) for r in renewed} == {(pull.pull_id, False) for pull in waiting}
        await target.client.run(target.plan_of(cancelled_pulls=[waiting[1].pull_id]))
        cancelled = await target.client.pulled()
        assert (cancelled.pull_id, cancelled.failure) == (waiting[1].pull_id, "cancelled")
        gate.leave()
        done = [await target.client.pulled() for _ in range(MAX_RUNNING + 1)]
        assert {r.pull_id for r in done} == {pull.pull_id for pull in (*running, waiting[0])}
        assert all(r.num_units == 1 for r in done)


async def test_a_lease_is_renewed_while_units_come_and_ends_when_they_do_not() -> None:
    gate = LayerGate(1)
    async with two_peers(source={"transports": (GRPC,), "after_read": gate}, transports=(GRPC,)) as (source, target):
        await source.compute()
        await target.client.run(target.plan_of(target.pull_from(source, lease_ms=SHORT_LEASE_MS)))
        assert not (await target.client.pull_report()).done  # the first layer came
        report = await target.client.pulled()
        gate.leave()
        assert (report.num_units, report.failure) == (0, "the source was silent for lease_ms = 200")
        assert target.resident() == set()


@asynccontextmanager
async def mute_server() -> AsyncIterator[str]:
    """Takes connections and never says a word."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.read(4096):
                pass
        finally:
            writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_sources_that_never_answer_end_their_pulls_and_hold_up_no_other_for_long() -> None:
    async with mute_server() as mute, two_peers() as (source, target):
        await source.compute()
        hung = [
            pull_from_address(mute, pages=range(9 + 9 * i, 18 + 9 * i), lease_ms=SHORT_LEASE_MS, pull_id=100 + i)
            for i in range(MAX_RUNNING)
        ]
        reports = await target.pull(*hung, target.pull_from(source))
        assert [(r.num_units, r.failure is None) for r in reports] == [(0, False)] * MAX_RUNNING + [(8, True)]
        assert await target.continue_from(128) == EXPECTED


async def test_a_source_that_is_not_there_fails_the_pull_by_name() -> None:
    async with peer() as target:
        address = f"127.0.0.1:{free_port()}"
        [report] = await target.pull(pull_from_address(address, pages=range(8), lease_ms=10_000))
        assert report.failure is not None and report.failure.startswith(f"source elsewhere at {address}: UNAVAILABLE")


@pytest.mark.parametrize("layer", [0, 2])
async def test_a_damaged_chunk_fails_the_pull(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(units: range, layers: range, pieces: Sequence[Bytes]) -> bytes:
        part = bytearray(encode_chunk(units, layers, pieces))
        if layer in layers:
            part[-100] ^= 1
        return bytes(part)

    monkeypatch.setattr("gpu_worker.transfer.source.encode_chunk", damaged)
    async with two_peers(source={"chunk_bytes": LAYER_BYTES}, transports=(GRPC,)) as (source, target):
        await source.compute()
        [report] = await target.pull(target.pull_from(source))
        assert (report.num_units, report.failure) == (0, f"chunk: checksum of layer {layer}, unit 0 is wrong")
        assert target.resident() == set()


async def test_an_epoch_that_is_over_is_refused() -> None:
    async with two_peers() as (source, target):
        await source.compute()
        pull = target.pull_from(source)
        pull.source_epoch = Epoch(99)
        [report] = await target.pull(pull)
        assert report.failure is not None
        assert report.failure.endswith("FAILED_PRECONDITION: source_epoch: 99 asked for, it is 100 now")


async def test_another_namespace_is_refused() -> None:
    async with (
        peer(FakeRunner(replace(CARD, revision="r2")), worker_id="source") as source,
        peer(worker_id="target") as target,
    ):
        await source.compute()
        [report] = await target.pull(target.pull_from(source))
        assert report.failure is not None
        assert report.failure.endswith("namespace: fake@r2/int64/16 here, fake@r1/int64/16 there")


@pytest.mark.parametrize(
    ("field", "value"),
    [("dtype", "int32"), ("num_layers", 4), ("num_kv_heads", 2), ("row_size", 2), ("element_bytes", 4)],
)
async def test_another_format_is_refused_by_the_field_that_differs(field: str, value: str | int) -> None:
    async with two_peers() as (source, target):
        kv = source.worker.runner.kv
        assert isinstance(kv, HostPages)
        ours = getattr(kv.format, field)
        kv.format = KvFormat(**asdict(kv.format) | {field: value})
        [report] = await target.pull(target.pull_from(source))
        assert report.failure is not None
        assert report.failure.endswith(f"FAILED_PRECONDITION: {field}: {value} here, {ours} there")


async def test_a_pull_that_cannot_be_carried_out_says_why() -> None:
    async with two_peers() as (source, target):
        await source.compute()
        few, outside, twice = (target.pull_from(source) for _ in range(3))
        del few.target_pages[4:]
        outside.target_pages[2] = PageId(64)
        twice.target_pages[2] = twice.target_pages[1]
        assert [r.failure for r in await target.pull(few, outside, twice)] == [
            "unit_hashes: 8, the target pages hold 4",
            "target_pages: page 64 of a pool of 64",
            "target_pages: one of them twice",
        ]


async def test_a_worker_without_kv_neither_takes_nor_gives() -> None:
    bare = FakeRunner()
    bare.kv = None
    async with peer(bare, worker_id="bare") as without, peer(worker_id="with") as other:
        [report] = await without.pull(without.pull_from(other))
        assert report.failure == "this worker takes no KV"
        [report] = await other.pull(other.pull_from(without))
        assert report.failure is not None and report.failure.endswith("this worker gives no KV")


async def test_a_stopping_worker_ends_its_pulls() -> None:
    gate = LayerGate()
    async with two_peers(after_copy=gate) as (source, target):
        await source.compute()
        await target.client.run(target.plan_of(target.pull_from(source)))
        await gate.entered()
        gate_client = target.client
    gate.leave()
    assert (await gate_client.pulled()).failure == "cancelled"
