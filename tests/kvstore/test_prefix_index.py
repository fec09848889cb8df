"""One contract, over the index in memory and the one in every kind of Redis; then what only Redis can get wrong."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from kvstore.memory_prefix_index import MemoryPrefixIndex
from kvstore.prefix_index import Holder, PrefixIndex, Tiers
from kvstore.prefix_twin import TierPrefix
from kvstore.redis_prefix_index import (
    BLOCK_UNITS,
    EXACT_UNITS,
    FIRST_STRETCH,
    MAX_CHAIN,
    MAX_COMMAND_UNITS,
    RedisPrefixIndex,
)
from tests.redis_fixture import RedisServer
from tests.redis_topology import Cluster, Watched
from wire import keys
from wire.errors import FenceLost
from wire.ids import Epoch, Fence, UnitHash, WorkerId
from wire.plan import Tier
from wire.redis_client import open_redis

FENCE = Fence(7)
DEVICE: Tiers = (Tier.DEVICE,)
HOST: Tiers = (Tier.HOST,)
DISK: Tiers = (Tier.DISK,)
W1, W2, W3 = (Holder(WorkerId(f"w{i}"), Epoch(i)) for i in (1, 2, 3))

KINDS = ["memory", "server", "no scripts", "refuses scripts", "sentinel", "cluster"]


def chain_of(length: int) -> list[UnitHash]:
    return [UnitHash(i.to_bytes(4, "little") * 8) for i in range(1, length + 1)]


async def collect(index: PrefixIndex, holder: Holder) -> dict[UnitHash, Tiers]:
    found: dict[UnitHash, Tiers] = {}
    async for part in index.units(holder):
        found |= part
    return found


async def redis_index(redis: Redis, cell: str, **options: Any) -> RedisPrefixIndex:
    await redis.set(keys.fence(cell), FENCE)
    return RedisPrefixIndex(redis, cell, fence=FENCE, **options)


@pytest.fixture(params=KINDS)
async def index(request: pytest.FixtureRequest) -> AsyncIterator[PrefixIndex]:
    kind, cell = request.param, f"px-{secrets.token_hex(4)}"
    if kind == "memory":
        yield MemoryPrefixIndex()
        return
    fixture: Any = request.getfixturevalue(
        {"sentinel": "redis_watched", "cluster": "redis_cluster"}.get(kind, "redis_url")
    )
    url: str = fixture if isinstance(fixture, str) else fixture.url
    async with open_redis(url, cell=cell) as redis:
        if kind == "refuses scripts":
            await refuse_scripts(redis, cell)
            url = url.replace("redis://", f"redis://{cell}:secret@")
            async with open_redis(url) as refused:
                yield await redis_index(refused, cell)
            await redis.acl_deluser(cell)
        else:
            yield await redis_index(redis, cell, scripts=kind != "no scripts")


async def refuse_scripts(redis: Any, user: str) -> None:
    await redis.execute_command("ACL", "SETUSER", user, "on", ">secret", "~*", "&*", "+@all", "-@scripting")


async def test_the_longest_prefix_of_each_by_tier(index: PrefixIndex) -> None:
    chain = chain_of(100)
    await index.write(W1, dict.fromkeys(chain[:70], DEVICE))
    await index.write(W2, dict.fromkeys(chain[:5], DEVICE) | dict.fromkeys(chain[5:40], HOST))
    await index.write(W2, dict.fromkeys(chain[40:90], DISK))
    await index.write(W3, dict.fromkeys(chain[1:], DEVICE))
    assert await index.lookup(chain, [W1, W2, W3]) == {W1: TierPrefix(70, 70, 70), W2: TierPrefix(5, 40, 90)}
    assert await index.lookup(chain[:50], [W2, W1]) == {W1: TierPrefix(50, 50, 50), W2: TierPrefix(5, 40, 50)}
    assert await index.lookup(chain, [W2]) == {W2: TierPrefix(5, 40, 90)}
    assert await index.lookup([], [W1]) == {} == await index.lookup(chain, [])


async def test_a_unit_in_several_tiers_counts_for_its_fastest(index: PrefixIndex) -> None:
    chain = chain_of(3)
    await index.write(W1, dict.fromkeys(chain, (Tier.DEVICE, Tier.HOST)))
    assert await index.lookup(chain, [W1]) == {W1: TierPrefix(3, 3, 3)}
    await index.write(W1, {chain[1]: (Tier.HOST, Tier.REDIS)})
    assert await index.lookup(chain, [W1]) == {W1: TierPrefix(1, 3, 3)}
    await index.write(W1, {chain[1]: (Tier.REDIS,), chain[2]: ()})
    assert await index.lookup(chain, [W1]) == {W1: TierPrefix(1, 1, 2)}


async def test_an_eviction_in_the_middle_cuts_the_prefix(index: PrefixIndex) -> None:
    chain = chain_of(60)
    await index.write(W1, dict.fromkeys(chain, DEVICE))
    await index.write(W1, {chain[30]: ()})
    assert await index.lookup(chain, [W1]) == {W1: TierPrefix(30, 30, 30)}


async def test_another_epoch_holds_nothing(index: PrefixIndex) -> None:
    chain = chain_of(3)
    later = Holder(W1.worker_id, Epoch(W1.epoch + 1))
    await index.write(W1, dict.fromkeys(chain, DEVICE))
    assert await index.lookup(chain, [later]) == {}
    await index.write(later, {chain[0]: DEVICE}, anew=True)
    await index.drop(W1)
    assert await index.lookup(chain, [W1, later]) == {later: TierPrefix(1, 1, 1)}


async def test_written_anew_nothing_else_is_left(index: PrefixIndex) -> None:
    chain = chain_of(3 * MAX_COMMAND_UNITS)
    assert not await index.write(W1, dict.fromkeys(chain, DEVICE))
    assert await index.write(W1, {chain[0]: DEVICE, chain[2]: HOST}, anew=True)
    assert await collect(index, W1) == {chain[0]: DEVICE, chain[2]: HOST}
    await index.drop(W1)
    assert await collect(index, W1) == {}
    assert not await index.write(W1, {chain[0]: DEVICE})


async def test_all_units_come_back_in_slices(index: PrefixIndex) -> None:
    units = dict.fromkeys(chain_of(5000), DEVICE) | {UnitHash(b"h" * 32): HOST, UnitHash(b"b" * 32): (*DEVICE, *DISK)}
    await index.write(W1, units)
    sizes = [len(part) async for part in index.units(W1)]
    assert await collect(index, W1) == units
    if not isinstance(index, MemoryPrefixIndex):
        assert max(sizes) < 2000


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_every_redis_says_what_memory_says(index: PrefixIndex, data: st.DataObject) -> None:
    holders = [W1, W2, W3]
    chain = chain_of(3 * FIRST_STRETCH)
    tiers = st.lists(st.sampled_from(Tier), unique=True, max_size=4).map(
        lambda some: tuple(t for t in Tier if t in some)
    )
    in_memory = MemoryPrefixIndex()
    for holder in holders:
        length = data.draw(st.integers(0, len(chain)))
        units = dict.fromkeys(chain[:length], data.draw(tiers))
        units |= data.draw(st.dictionaries(st.sampled_from(chain), tiers, max_size=8))
        for written in (in_memory, index):
            await written.write(holder, units, anew=True)
    assert await index.lookup(chain, holders) == await in_memory.lookup(chain, holders)
    for holder in holders:
        assert await collect(index, holder) == await collect(in_memory, holder)


# -- Redis alone ---------------------------------------------------------------------------------------------------


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Any]:
    async with open_redis(redis_url) as client:
        yield client


@pytest.mark.parametrize("scripts", [True, False])
async def test_what_is_not_ours_is_not_counted_and_left_alone(redis: Any, scripts: bool) -> None:
    cell = f"px-{secrets.token_hex(4)}"
    index = await redis_index(redis, cell, scripts=scripts)
    chain = chain_of(4)
    await index.write(W1, dict.fromkeys(chain, DEVICE))
    foreign = {b"short": b"d", chain[2]: b"z", b"x" * 33: b"d", b"": b""}
    key = keys.prefixes(cell, W1.worker_id, W1.epoch)
    await redis.hset(key, mapping=foreign)
    assert await index.lookup([*chain, UnitHash(b"")], [W1]) == {W1: TierPrefix(2, 2, 2)}
    assert await collect(index, W1) == dict.fromkeys([chain[0], chain[1], chain[3]], DEVICE)
    for value in (b"dd", b"hd", b"d ", b"d\xff", b"dhkrd", b"D"):
        await redis.hset(key, chain[0], value)
        assert await index.lookup(chain, [W1]) == {}
    assert await redis.hget(key, b"short") == b"d"


@pytest.mark.parametrize("scripts", [True, False])
async def test_a_key_of_another_type_is_no_holder_and_left_alone(redis: Any, scripts: bool) -> None:
    cell = f"px-{secrets.token_hex(4)}"
    index = await redis_index(redis, cell, scripts=scripts)
    chain = chain_of(40)
    key = keys.prefixes(cell, W1.worker_id, W1.epoch)
    await redis.set(key, "somebody's")
    await index.write(W2, dict.fromkeys(chain, DEVICE))
    assert await index.lookup(chain, [W1, W2]) == {W2: TierPrefix(40, 40, 40)}
    for refused in (index.write(W1, {chain[0]: DEVICE}, anew=True), index.drop(W1)):
        with pytest.raises(ResponseError, match=r"WRONGTYPE .*px:w1:1 is a string, not ours"):
            await refused
    assert await redis.get(key) == b"somebody's"


async def test_entries_lapse_with_the_worker_s_lease(redis: Any) -> None:
    cell = f"px-{secrets.token_hex(4)}"
    index = await redis_index(redis, cell)
    await index.write(W1, {chain_of(1)[0]: DEVICE})
    assert 0 < await redis.pttl(keys.prefixes(cell, W1.worker_id, W1.epoch)) <= keys.WORKER_LEASE_TTL_S * 1000


async def test_only_the_fence_that_redis_has_may_write(redis: Any) -> None:
    cell = f"px-{secrets.token_hex(4)}"
    index = await redis_index(redis, cell)
    chain = chain_of(2)
    await index.write(W1, {chain[0]: DEVICE})
    await redis.set(keys.fence(cell), FENCE + 1)
    for refused in (index.write(W1, {chain[1]: DEVICE}), index.drop(W1), RedisPrefixIndex(redis, cell).drop(W1)):
        with pytest.raises(FenceLost):
            await refused
    assert await index.lookup(chain, [W1]) == {W1: TierPrefix(1, 1, 1)}


async def test_a_fence_that_changes_in_mid_write_stops_it(redis: Any) -> None:
    cell = f"px-{secrets.token_hex(4)}"
    index = await redis_index(redis, cell)
    writing = True

    async def take_over() -> None:
        fence = FENCE
        while writing:
            await redis.set(keys.fence(cell), fence)  # the same value: only WATCH can tell
            await asyncio.sleep(0)

    taking_over = asyncio.create_task(take_over())
    try:
        with pytest.raises(FenceLost, match="changed"):
            for _ in range(500):
                await index.write(W1, {chain_of(1)[0]: DEVICE})
    finally:
        writing = False
        await taking_over


async def test_a_lookup_is_one_round_trip_and_survives_a_script_flush(redis_server: RedisServer) -> None:
    async with open_redis(redis_server.url) as redis, open_redis(redis_server.url) as other:
        index = await redis_index(redis, "trips")
        chain = chain_of(2000)
        holders = [Holder(WorkerId(f"w{i}"), Epoch(1)) for i in range(16)]
        for holder in holders:
            await index.write(holder, dict.fromkeys(chain, DEVICE))

        async def commands(calls: Callable[[], Awaitable[Any]]) -> dict[str, int]:
            """By name, less those that scripts make, which Redis counts too."""
            await other.config_resetstat()
            await calls()
            stats: Any = await other.info("commandstats")
            return {name: int(s["calls"]) for name, s in stats.items() if name.startswith("cmdstat_eval")}

        everywhere = dict.fromkeys(holders, TierPrefix(2000, 2000, 2000))
        assert await index.lookup(chain, holders) == everywhere
        assert await commands(lambda: index.lookup(chain, holders)) == {"cmdstat_evalsha": 1}
        await other.script_flush()
        assert await index.lookup(chain, holders) == everywhere
        assert await commands(lambda: index.lookup(chain, holders)) == {"cmdstat_evalsha": 1}


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_many_long_prefixes_are_followed_in_blocks_to_their_exact_ends(redis: Any, data: st.DataObject) -> None:
    """No unit within a prefix is missing; behind its end any but the last of a block may be there."""
    cell = f"px-{secrets.token_hex(4)}"
    index = await redis_index(redis, cell)
    chain = chain_of(data.draw(st.integers(EXACT_UNITS, EXACT_UNITS + 100)))
    expected: dict[Holder, TierPrefix] = {}
    within_blocks = [unit for i, unit in enumerate(chain, 1) if i % BLOCK_UNITS]
    for i in range(5):
        holder = Holder(WorkerId(f"w{i}"), Epoch(1))
        ends = sorted(data.draw(st.integers(0, len(chain))) for _ in range(3))
        units = dict.fromkeys(chain[: ends[0]], DEVICE) | dict.fromkeys(chain[ends[0] : ends[1]], HOST)
        units |= dict.fromkeys(chain[ends[1] : ends[2]], DISK)
        units |= dict.fromkeys(data.draw(st.lists(st.sampled_from(within_blocks), max_size=5)), DEVICE)
        await index.write(holder, units, anew=True)
        in_memory = MemoryPrefixIndex()
        await in_memory.write(holder, units)
        expected |= await in_memory.lookup(chain, [holder])
    assert await index.lookup(chain, [Holder(WorkerId(f"w{i}"), Epoch(1)) for i in range(5)]) == expected


async def test_in_many_long_prefixes_only_a_single_missing_unit_is_overlooked(redis: Any) -> None:
    index = await redis_index(redis, f"px-{secrets.token_hex(4)}")
    chain = chain_of(EXACT_UNITS)
    holders = [Holder(WorkerId(f"w{i}"), Epoch(1)) for i in range(3)]
    for holder in holders:
        await index.write(holder, dict.fromkeys(chain, DEVICE))
    first, second = holders[:2]
    for holder in (first, second):
        await index.write(holder, {chain[100]: ()})
    await index.write(holders[2], dict.fromkeys(chain[100 : 100 + BLOCK_UNITS], ()))
    found = await index.lookup(chain, [first, holders[2]])
    assert found == {holder: TierPrefix(100, 100, 100) for holder in (first, holders[2])}
    await index.write(first, {chain[100]: DEVICE})
    found = await index.lookup(chain, holders)
    assert found[second].device == EXACT_UNITS
    assert found[holders[2]].device == 100


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_exact_lookups_overlook_no_missing_unit_of_a_long_prefix(redis: Any, data: st.DataObject) -> None:
    """By a script that reads all, and where there are no scripts."""
    cell = f"px-{secrets.token_hex(4)}"
    by_script, by_pipelines = [await redis_index(redis, cell, exact=True, scripts=scripts) for scripts in (True, False)]
    chain = chain_of(data.draw(st.integers(EXACT_UNITS, 3 * EXACT_UNITS)))
    holders = [Holder(WorkerId(f"w{i}"), Epoch(1)) for i in range(4)]
    in_memory = MemoryPrefixIndex()
    for holder in holders:
        length = data.draw(st.integers(0, len(chain)))
        units = dict.fromkeys(chain[:length], data.draw(st.sampled_from([DEVICE, HOST, DISK])))
        units |= data.draw(st.dictionaries(st.sampled_from(chain), st.sampled_from([DEVICE, HOST, ()]), max_size=3))
        for index in (by_script, in_memory):
            await index.write(holder, units, anew=True)
    expected = await in_memory.lookup(chain, holders)
    assert await by_script.lookup(chain, holders) == expected
    assert await by_pipelines.lookup(chain, holders) == expected


async def test_a_chain_is_looked_up_to_a_bound(redis: Any) -> None:
    index = await redis_index(redis, f"px-{secrets.token_hex(4)}")
    chain = chain_of(MAX_CHAIN + 10)
    await index.write(W1, dict.fromkeys(chain, DEVICE))
    assert await index.lookup(chain, [W1]) == {W1: TierPrefix(MAX_CHAIN, MAX_CHAIN, MAX_CHAIN)}


# -- where the master moves ----------------------------------------------------------------------------------------


async def answers(index: PrefixIndex, chain: Sequence[UnitHash], expected: dict[Holder, TierPrefix]) -> int:
    """Ask until that is the answer, as every user of the client does: it never retries itself. Returns how often the
    connection was lost."""
    lost = 0
    async with asyncio.timeout(20):
        while True:
            try:
                if await index.lookup(chain, [W1]) == expected:
                    return lost
            except (RedisConnectionError, OSError):
                lost += 1
            await asyncio.sleep(0.02)


async def test_after_a_failover_the_index_is_where_the_new_master_is(redis_watched: Watched) -> None:
    cell = f"px-{secrets.token_hex(4)}"
    chain = chain_of(3)
    async with open_redis(redis_watched.url, cell=cell) as redis:
        index = await redis_index(redis, cell)
        await index.write(W1, {chain[0]: DEVICE})
        await redis.persist(keys.prefixes(cell, W1.worker_id, W1.epoch))  # a failover takes seconds
        await redis.wait(1, 5000)
        await asyncio.to_thread(redis_watched.fail_over)
        await answers(index, chain, {W1: TierPrefix(1, 1, 1)})
        for attempt in range(2):  # the first may meet the old master, or a connection that it closed
            try:
                await index.write(W1, {chain[1]: DEVICE})
                break
            except (RedisConnectionError, OSError):
                assert attempt == 0
        await answers(index, chain, {W1: TierPrefix(2, 2, 2)})
        assert (await redis.info("replication"))["role"] == "master"


async def test_a_slot_that_moves_is_followed(redis_cluster: Cluster) -> None:
    cell = f"px-{secrets.token_hex(4)}"
    chain = chain_of(3)
    async with open_redis(redis_cluster.url, cell=cell) as client:
        redis: Any = client
        index = await redis_index(redis, cell)
        await index.write(W1, dict.fromkeys(chain, DEVICE))
        key = keys.prefixes(cell, W1.worker_id, W1.epoch)
        await redis.persist(key)
        slot: int = await redis.execute_command("CLUSTER", "KEYSLOT", key)
        source = await asyncio.to_thread(redis_cluster.owner, slot)
        target = next(node for node in redis_cluster.nodes if node is not source)
        await asyncio.to_thread(redis_cluster.move_slot, slot, source, target)
        lost = await answers(index, chain, {W1: TierPrefix(3, 3, 3)})
        assert lost >= 1, "the slot did not move"
        assert await index.write(W1, {chain[0]: HOST})
        await asyncio.to_thread(redis_cluster.move_slot, slot, target, source)
