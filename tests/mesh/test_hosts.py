"""A mesh over several hosts and the partitions between them (design §4, §9): streams go on, nothing is stuck, no token
is lost or doubled, every page comes back.

Workers are simulated, so every token is known beforehand; one test has the real model. The test ids say how the hosts
were made. Slow links exist between relays only, for not every kernel can delay packets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest
from redis import Redis

from gpu_worker.simulated_runner import TokenSource
from tests.mesh.client import complete, events
from tests.mesh.conftest import eventually
from tests.mesh.hosts import WAYS, HostedStack, held_pages, open_network
from tests.mesh.relays import LoopbackNetwork
from tests.mesh.stack import Service
from wire import keys
from wire.ids import WorkerId
from wire.redis_client import open_redis

VOCAB, EOS_IDS = 49152, (2,)
"""Of SmolLM2-135M-Instruct."""
CELL = "default"
PROMPT = "Once upon a time, in a village by the sea,"
SIMULATED = {
    "SIMULATE": "on",
    "SIMULATED_FIXED_US": "10000",
    "SIMULATED_PREFILL_TOKEN_US": "1000",
    "KV_PAGES": "400",
    "STEP_TOKEN_BUDGET": "4096",
    "ITL_TARGET_MS": "inf",  # a long prompt is one long step
}
STREAMS, TOKENS = 8, 200
"""Two seconds of steps: a partition falls into the middle."""
END_S = 60.0
"""A stream that takes longer is stuck."""

Session = aiohttp.ClientSession


@dataclass
class Stream:
    seed: int
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    error: object = None

    def is_right(self) -> bool:
        predicted = TokenSource(VOCAB, EOS_IDS).tokens(
            [self.seed] * self.max_tokens, [0] * self.max_tokens, range(self.max_tokens)
        )
        return self.error is None and self.ends == ["length"] and self.tokens == predicted


class Scene:
    """A stack, its network, and streams with a seed each."""

    def __init__(self, stack: HostedStack, session: Session) -> None:
        self.stack = stack
        self.network = stack.network
        self._session = session
        self._tasks: list[asyncio.Task[Stream]] = []

    def start(self, count: int = STREAMS, max_tokens: int = TOKENS, prompt: str | list[int] = PROMPT) -> None:
        for _ in range(count):
            stream = Stream(len(self._tasks) + 1, max_tokens)
            self._tasks.append(asyncio.create_task(self._follow(stream, prompt)))

    async def _follow(self, stream: Stream, prompt: str | list[int]) -> Stream:
        wanted = {"seed": stream.seed, "max_tokens": stream.max_tokens, "return_token_ids": True}
        async for event in events(self._session, self.stack.url, prompt, **wanted):
            stream.error = stream.error or event.get("error")
            for choice in event.get("choices", ()):
                stream.tokens += choice.get("token_ids") or []
                if choice["finish_reason"] is not None:
                    stream.ends.append(choice["finish_reason"])
        return stream

    async def run_on(self, *hosts: str) -> None:
        """Wait until each of these workers has some of the streams."""
        for worker in map(self.stack.worker, hosts):
            await eventually(
                f"{worker.name} runs a stream", lambda w=worker: w.metric("phasemesh_worker_sequences") > 0
            )

    async def end_right(self, scheduler: Service | None = None) -> None:
        """Every stream ends once, with all its tokens in order; then the (active) scheduler has both workers, and
        nothing is left in them or in Redis."""
        for stream in await asyncio.wait_for(asyncio.gather(*self._tasks), END_S):
            assert stream.is_right(), stream
        await asyncio.to_thread(self.stack.wait_at_rest, scheduler=scheduler)
        async with open_redis(self.stack.redis.url) as redis:
            assert await redis.scard(keys.live(CELL)) == 0
            assert [await redis.xlen(keys.requests(CELL, lane)) for lane in keys.LANES] == [0, 0]

    async def serves_again(self) -> None:
        """Both workers take part."""
        before = await asyncio.to_thread(self._worked)
        self.start(max_tokens=20)
        await self.end_right()
        after = await asyncio.to_thread(self._worked)
        assert all(more > less for more, less in zip(after, before, strict=True)), (before, after)

    def _worked(self) -> list[float]:
        """Tokens each worker has processed."""
        return [sum(worker.samples("phasemesh_worker_tokens_total").values()) for worker in self.stack.workers]

    async def leave(self) -> None:
        """The client of the stream that was started last goes away."""
        task = self._tasks.pop()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def sees_workers(self, count: int) -> None:
        scheduler = self.stack.scheduler
        await eventually(f"{count} workers", lambda: scheduler.metric("phasemesh_scheduler_workers") == count, 20)

    async def is_refused(self) -> None:
        """A new request gets a 503: nobody waits for a mesh that is not there."""
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 1}
        async with self._session.post(f"{self.stack.url}/v1/completions", json=body) as answer:
            assert answer.status == 503, await answer.text()

    async def is_registered(self, host: str, registered: bool) -> None:
        """Wait until Redis knows a worker, or has forgotten it."""
        key = keys.worker(CELL, WorkerId(host))

        def is_so() -> bool:
            with Redis.from_url(self.stack.redis.url) as redis:
                return bool(redis.exists(key)) == registered

        await eventually(f"{key} is{'' if registered else ' not'} there", is_so, 20)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task


@asynccontextmanager
async def whole(stack: HostedStack, session: Session) -> AsyncIterator[Scene]:
    """A stack that is shared: whole and at rest before, and no streams or cuts of this test's after."""
    at_rest = {worker.name: 0 for worker in stack.workers}
    await eventually("at rest", lambda: held_pages(stack.scheduler) == at_rest, 20)
    await eventually("ready", stack.gateway.is_healthy, 20)
    scene = Scene(stack, session)
    try:
        yield scene
    finally:
        await scene.stop()
        stack.network.heal_all()


@pytest.fixture(scope="module", params=WAYS)
def three_hosts(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostedStack]:
    directory = tmp_path_factory.mktemp("three")
    with (
        open_network(request.param, ["a", "b", "c"]) as network,
        HostedStack(network, smollm2_dir, directory, front="a", workers={"b": {}, "c": {}}, env=SIMULATED) as stack,
    ):
        yield stack


@pytest.fixture(scope="module", params=WAYS[:1])
def five_hosts(
    request: pytest.FixtureRequest, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HostedStack]:
    directory = tmp_path_factory.mktemp("five")
    places = {"front": "scheduler", "redis": "redis", "gateway": "gateway"}
    with (
        open_network(request.param, ["redis", "scheduler", "gateway", "b", "c"]) as network,
        HostedStack(network, smollm2_dir, directory, **places, workers={"b": {}, "c": {}}, env=SIMULATED) as stack,
    ):
        yield stack


@pytest.fixture
async def three(three_hosts: HostedStack, session: Session) -> AsyncIterator[Scene]:
    """Redis, scheduler and gateway on a, workers on b and c."""
    async with whole(three_hosts, session) as scene:
        yield scene


@pytest.fixture
async def five(five_hosts: HostedStack, session: Session) -> AsyncIterator[Scene]:
    """Everything on a host of its own: redis, scheduler, gateway, b, c."""
    async with whole(five_hosts, session) as scene:
        yield scene


async def test_streams_run_on_workers_of_two_hosts(three: Scene) -> None:
    await three.serves_again()


async def test_a_worker_host_that_is_cut_off_loses_no_stream_and_serves_again(three: Scene) -> None:
    """Longer than the worker's lease: Redis has forgotten it as well."""
    three.start()
    await three.run_on("b", "c")
    three.network.partition("a", "b")
    await three.sees_workers(1)
    await three.is_registered("b", False)
    three.network.heal("a", "b")
    await three.end_right()
    await three.serves_again()


@pytest.mark.parametrize("three_hosts", WAYS[:1], indirect=True)
async def test_a_worker_that_dies_behind_a_partition_is_another_when_it_heals(three: Scene) -> None:
    three.start()
    await three.run_on("b", "c")
    three.network.partition("a", "b")
    worker = three.stack.worker("b")
    worker.kill()
    worker.start()
    await three.sees_workers(1)
    await asyncio.to_thread(worker.wait_healthy)  # it starts without Redis
    three.network.heal("a", "b")
    await three.end_right()
    await three.serves_again()


@pytest.mark.parametrize("three_hosts", WAYS[:1], indirect=True)
async def test_a_blink_of_the_network_costs_no_token(three: Scene) -> None:
    three.start()
    await three.run_on("b", "c")
    three.network.partition("a", "b")
    await asyncio.sleep(0.5)  # shorter than any keepalive
    three.network.heal("a", "b")
    await three.end_right()


@pytest.mark.parametrize(("source", "target"), [("scheduler", "b"), ("b", "scheduler")])
async def test_a_link_that_loses_one_direction_is_as_good_as_cut(five: Scene, source: str, target: str) -> None:
    five.start()
    await five.run_on("b", "c")
    five.network.cut(source, target)
    await five.sees_workers(1)
    await five.run_on("c")
    five.network.heal("scheduler", "b")
    await five.end_right()
    await five.serves_again()


async def test_a_cut_in_the_middle_of_a_long_step(five: Scene) -> None:
    """The worker is back only when that step is over, and what it computed for the old session counts for nothing."""
    for token_id in (10, 11):  # the same prompt again would go where it is cached
        five.start(1, 50, [token_id] * 3000)
    await five.run_on("b", "c")
    five.network.partition("scheduler", "b")
    await five.sees_workers(1)
    five.network.heal("scheduler", "b")
    await five.end_right()


async def test_a_worker_without_redis_goes_on_serving(five: Scene) -> None:
    """Its session outlives its registration: whether it lives, the session knows better."""
    displaced = five.stack.scheduler.metric("phasemesh_scheduler_displaced_sequences_total")
    five.start()
    await five.run_on("b", "c")
    five.network.partition("redis", "b")
    await five.is_registered("b", False)
    await five.serves_again()
    assert five.stack.scheduler.metric("phasemesh_scheduler_displaced_sequences_total") == displaced
    five.network.heal("redis", "b")
    await five.is_registered("b", True)
    await five.end_right()


async def test_a_gateway_without_redis_refuses_and_then_resumes(five: Scene) -> None:
    five.start()
    await five.run_on("b", "c")
    five.start(1, 4000)
    await five.run_on("b", "c")
    five.network.partition("redis", "gateway")
    await eventually("not ready", lambda: not five.stack.gateway.is_healthy())
    await five.is_refused()
    await five.leave()
    five.network.heal("redis", "gateway")
    await five.end_right()
    await eventually("ready again", five.stack.gateway.is_healthy)
    await five.serves_again()


async def test_a_scheduler_without_redis_goes_on_when_it_is_back(five: Scene) -> None:
    """Longer than its lease, which nobody else takes: it counts as held, and its output waits."""
    five.start()
    await five.run_on("b", "c")
    five.network.partition("redis", "scheduler")
    five.start(4)  # admitted by the cell card that has not lapsed, read by nobody yet
    await eventually("not ready", lambda: not five.stack.gateway.is_healthy())
    await five.is_refused()
    five.network.heal("redis", "scheduler")
    await five.end_right()
    await eventually("ready again", five.stack.gateway.is_healthy)
    await five.serves_again()


async def test_a_standby_takes_over_from_a_scheduler_without_redis(five: Scene) -> None:
    """The old one has its workers until they see the higher fence; what it says afterwards counts for nothing."""
    standby = five.stack.another_scheduler("standby", "gateway")
    standby.start()
    try:
        five.start()
        await five.run_on("b", "c")
        five.network.partition("redis", "scheduler")
        await eventually("the standby is active", standby.is_healthy)
        await eventually("it has the workers", lambda: standby.metric("phasemesh_scheduler_workers") == 2)
        five.network.heal("redis", "scheduler")
        await eventually("the old one stands by", lambda: not five.stack.scheduler.is_healthy())
        await five.end_right(standby)
    finally:
        standby.stop()
    await eventually("the old one is active", five.stack.scheduler.is_healthy)
    await eventually("ready again", five.stack.gateway.is_healthy)
    await five.serves_again()


async def test_slow_links_change_no_token(smollm2_dir: Path, tmp_path: Path, session: Session) -> None:
    with LoopbackNetwork(["a", "b", "c"]) as network:
        for pair in (("a", "b"), ("a", "c"), ("b", "c")):
            network.slow_down(*pair, delay_s=0.05, bytes_per_s=10e6 / 8)
        workers: dict[str, dict[str, str]] = {"b": {}, "c": {}}
        with HostedStack(network, smollm2_dir, tmp_path, front="a", workers=workers, env=SIMULATED) as stack:
            async with whole(stack, session) as scene:
                await scene.serves_again()


@pytest.mark.parametrize("way", WAYS[:1])
async def test_the_real_model_says_the_same_after_a_partition(
    way: str, smollm2_dir: Path, tmp_path: Path, session: Session
) -> None:
    workers: dict[str, dict[str, str]] = {"b": {}, "c": {}}
    with (
        open_network(way, ["a", "b", "c"]) as network,
        HostedStack(network, smollm2_dir, tmp_path, front="a", workers=workers) as stack,
    ):
        prompts = [f"{PROMPT} there were {n}" for n in ("two", "three", "five", "seven")]

        async def answers() -> list[list[int]]:
            done = (complete(session, stack.url, prompt, 40, ignore_eos=True) for prompt in prompts)
            return [answer.token_ids for answer in await asyncio.gather(*done)]

        before = await answers()
        assert [len(tokens) for tokens in before] == [40] * len(prompts)
        again = asyncio.create_task(answers())
        scene = Scene(stack, session)
        await scene.run_on("b", "c")
        network.partition("a", "b")
        await scene.sees_workers(1)
        network.heal("a", "b")
        assert await asyncio.wait_for(again, END_S) == before
        await asyncio.to_thread(stack.wait_at_rest)
