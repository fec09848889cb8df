"""The worker's side of a session, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from gpu_worker.server import bind_server
from gpu_worker.server.session import RESIDENTS_MESSAGE_BYTES, residents_messages
from gpu_worker.step_batch import StepBatch
from gpu_worker.transfer.host_id import host_id
from kvstore.prefix_hash import chain
from tests.worker.fake_runner import CARD, FakeRunner, reference_output
from tests.worker.fake_worker import running_worker
from tests.worker.plans import ROOT, chunk, decode, grant, plan
from tests.worker.test_executor import Gate, tokens_of
from wire import worker_pb2 as pb
from wire import worker_pb2_grpc as pb_grpc
from wire.errors import ConfigInvalid
from wire.ids import UNIT_TOKENS, Epoch, PageId, UnitHash
from wire.plan import PageUnits, Role, StepPlan, StepReport, WorkerInfo
from wire.worker_codec import decode_hello, decode_report, decode_residents, encode_plan

TIMEOUT_S = 10.0
PROMPT = list(range(1, 41))


class Stream:
    """A scheduler's end of one session."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = pb_grpc.WorkerStub(channel).Session()

    async def send(self, message: pb.ToWorker) -> None:
        await asyncio.wait_for(self._call.write(message), TIMEOUT_S)

    async def submit(self, step_plan: StepPlan) -> None:
        await self.send(pb.ToWorker(plan=encode_plan(step_plan)))

    async def receive(self) -> pb.ToScheduler:
        message = await asyncio.wait_for(self._call.read(), TIMEOUT_S)
        assert isinstance(message, pb.ToScheduler), "the stream ended"
        return message

    async def attach(self, fence: int) -> tuple[WorkerInfo, list[PageUnits]]:
        await self.send(pb.ToWorker(attach=pb.Attach(fence=fence, scheduler_id="s1")))
        hello = decode_hello((await self.receive()).hello)
        residents: list[PageUnits] = []
        while True:
            message = (await self.receive()).residents
            residents += decode_residents(message).pages
            if message.last:
                return hello, residents

    async def collect(self) -> list[StepReport]:
        """Reports up to and with the next that ends a plan."""
        reports: list[StepReport] = []
        while not reports or not reports[-1].plan_done:
            reports.append(decode_report((await self.receive()).report))
        return reports

    async def run(self, step_plan: StepPlan) -> list[StepReport]:
        await self.submit(step_plan)
        return await self.collect()

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """How the stream ended; waits for its end."""
        code = await asyncio.wait_for(self._call.code(), TIMEOUT_S)
        return code, await self._call.details()

    async def close(self) -> None:
        await self._call.done_writing()

    def cancel(self) -> None:
        self._call.cancel()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield channel


async def test_attach_says_hello_then_residents_and_plans_run() -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        stream = Stream(channel)
        hello, residents = await stream.attach(fence=1)
        assert hello == WorkerInfo(
            worker_id=worker.worker_id,
            epoch=Epoch(100),
            role=Role.BOTH,
            advertise_address=worker.address,
            model=CARD,
            num_pages=64,
            page_size=16,
            unit_tokens=UNIT_TOKENS,
            unit_bytes=2 * 3 * 16 * 8,  # K and V, layers, slots, int64
            host_id=host_id(),
        )
        assert residents == []
        first = chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3, 4], 60))
        reports = await stream.run(plan(1, chunks=[first], max_steps=16))
        assert tokens_of(reports, 1) == reference_output(PROMPT, 16)
        await stream.close()
        assert await stream.status() == (grpc.StatusCode.OK, "")


async def test_units_are_listed_beside_a_session_and_without_one() -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        stub = pb_grpc.WorkerStub(channel)

        async def listed(epoch: int = 100) -> list[PageUnits]:
            messages = stub.ListUnits(pb.ListUnitsRequest(epoch=epoch), timeout=TIMEOUT_S)
            return [page async for message in messages for page in decode_residents(message).pages]

        assert await listed() == []
        stream = Stream(channel)
        await stream.attach(fence=1)
        await stream.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([5, 6, 7], 48))]))
        hashes = chain(ROOT, PROMPT)
        resident = [PageUnits(PageId(5), hashes[:1]), PageUnits(PageId(6), hashes[1:2])]
        assert await listed() == resident
        await stream.close()
        await stream.status()
        assert await listed() == resident
        with pytest.raises(grpc.aio.AioRpcError, match="epoch 99: it is 100 here") as refused:
            await listed(99)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize("how", ["close", "cancel"])
async def test_after_a_break_the_next_session_finds_computed_units_but_no_sequences(how: str) -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        stream = Stream(channel)
        await stream.attach(fence=1)
        await stream.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([5, 6, 7], 48))]))
        if how == "close":
            await stream.close()
        else:
            stream.cancel()
        await stream.status()
        again = Stream(channel)
        hello, residents = await attach_when_free(again, channel, fence=1)
        hashes = chain(ROOT, PROMPT)
        assert hello.epoch == 100
        assert residents == [PageUnits(PageId(5), hashes[:1]), PageUnits(PageId(6), hashes[1:2])]


async def attach_when_free(stream: Stream, channel: grpc.aio.Channel, fence: int) -> tuple[WorkerInfo, list[PageUnits]]:
    """As a scheduler does: the worker may not have noticed yet that the last session is over."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                return await stream.attach(fence)
            except (AssertionError, grpc.aio.AioRpcError):
                assert (await stream.status())[0] is grpc.StatusCode.FAILED_PRECONDITION
                stream = Stream(channel)
                await asyncio.sleep(0.02)


@pytest.mark.parametrize("fence", [4, 5])
async def test_a_fence_that_is_not_higher_is_refused_while_a_session_lives(fence: int) -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        live = Stream(channel)
        await live.attach(fence=5)
        other = Stream(channel)
        await other.send(pb.ToWorker(attach=pb.Attach(fence=fence)))
        assert await other.status() == (
            grpc.StatusCode.FAILED_PRECONDITION,
            f"fence {fence}: a session with fence 5 is live",
        )
        assert (await live.run(plan(1, max_steps=0, fence=5)))[0].plan_done


async def test_a_higher_fence_takes_over_and_the_old_stream_ends() -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        old = Stream(channel)
        await old.attach(fence=5)
        await old.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48))], fence=5))
        new = Stream(channel)
        _, residents = await new.attach(fence=6)
        assert [p.page_id for p in residents] == [1, 2]
        assert await old.status() == (grpc.StatusCode.FAILED_PRECONDITION, "fence 5: taken over by fence 6")
        assert (await new.run(plan(1, decodes=[decode(1)], fence=6)))[0].progress == []


async def test_a_plan_of_an_old_fence_ends_the_stream() -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        stream = Stream(channel)
        await stream.attach(fence=5)
        await stream.submit(plan(1, max_steps=0, fence=4))
        assert await stream.status() == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "plan 1: fence 4, this session's is 5",
        )


async def test_messages_out_of_protocol_end_the_stream() -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        unattached = Stream(channel)
        await unattached.submit(plan(1, max_steps=0))
        assert (await unattached.status())[0] is grpc.StatusCode.INVALID_ARGUMENT

        twice = Stream(channel)
        await twice.attach(fence=1)
        await twice.send(pb.ToWorker(attach=pb.Attach(fence=1)))
        assert (await twice.status())[0] is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_failing_step_is_reported_ends_the_stream_and_begins_a_new_epoch() -> None:
    runner = FakeRunner()

    def fail(batch: StepBatch) -> None:
        raise RuntimeError("device lost")

    async with running_worker(runner) as worker, connected(worker.address) as channel:
        stream = Stream(channel)
        await stream.attach(fence=1)
        await stream.run(plan(1, chunks=[chunk(1, 0, 40, tokens=PROMPT, pages=grant([1, 2, 3], 48))]))
        runner.before_forward = fail
        reports = await stream.run(plan(2, decodes=[decode(1)]))
        assert reports[-1].failure == "RuntimeError: device lost"
        assert await stream.status() == (grpc.StatusCode.INTERNAL, "RuntimeError: device lost")
        runner.before_forward = lambda batch: None
        again = Stream(channel)
        hello, residents = await attach_when_free(again, channel, fence=1)
        assert (hello.epoch, residents) == (101, [])


async def test_a_take_over_does_not_wait_for_a_scheduler_that_does_not_read() -> None:
    runner, gate = FakeRunner(), Gate()
    runner.before_forward = gate
    async with running_worker(runner) as worker, connected(worker.address) as channel:
        old = Stream(channel)
        await old.attach(fence=1)
        await old.submit(plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))], max_steps=9))
        await gate.entered()
        new = Stream(channel)
        attaching = asyncio.ensure_future(new.attach(fence=2))
        assert (await old.status())[0] is grpc.StatusCode.FAILED_PRECONDITION
        gate.leave()
        await attaching


async def test_a_stopping_worker_ends_its_session_as_unavailable() -> None:
    async with running_worker() as worker, connected(worker.address) as channel:
        stream = Stream(channel)
        await stream.attach(fence=1)
        worker.service.drain()
        assert (await stream.status())[0] is grpc.StatusCode.UNAVAILABLE
        refused = Stream(channel)
        await refused.send(pb.ToWorker(attach=pb.Attach(fence=9)))
        assert (await refused.status())[0] is grpc.StatusCode.UNAVAILABLE


async def test_a_peer_that_goes_silent_is_noticed_within_seconds() -> None:
    """A proxy that stops forwarding stands for a host that vanished: no FIN, no RST."""
    async with (
        running_worker() as worker,
        silenceable_proxy(worker.address) as (address, silence),
        connected(address) as lost,
        connected(worker.address) as channel,
    ):
        stream = Stream(lost)
        await stream.attach(fence=1)
        silence.set()
        started = asyncio.get_running_loop().time()
        await attach_when_free(Stream(channel), channel, fence=1)
        assert asyncio.get_running_loop().time() - started < 4.0
        stream.cancel()


@asynccontextmanager
async def silenceable_proxy(target: str) -> AsyncIterator[tuple[str, asyncio.Event]]:
    silence = asyncio.Event()
    host, port = target.split(":")
    connections: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not silence.is_set():
                writer.write(data)
                await writer.drain()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))
        finally:
            for end in (writer, up_writer):
                end.close()
                await end.wait_closed()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.ensure_future(forward(reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", silence
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


@pytest.mark.parametrize("num_pages", [0, 1, 5000])
def test_residents_are_chunked_under_the_message_limit(num_pages: int) -> None:
    pages = [PageUnits(PageId(i), [UnitHash(bytes(32))] * 16) for i in range(num_pages)]
    messages = list(residents_messages(pages))
    assert [m.last for m in messages] == [False] * (len(messages) - 1) + [True]
    assert all(m.ByteSize() <= RESIDENTS_MESSAGE_BYTES for m in messages)
    assert [page for m in messages for page in decode_residents(m).pages] == pages
    assert len(messages) == max(1, -(-num_pages * 560 // RESIDENTS_MESSAGE_BYTES))


async def test_a_taken_port_is_named() -> None:
    async with running_worker() as worker:
        with pytest.raises(ConfigInvalid, match="PHASEMESH_WORKER_PORT"):
            bind_server("127.0.0.1", int(worker.address.split(":")[1]))
