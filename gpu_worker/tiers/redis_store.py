"""Units in Redis, for every worker of the cell: `{cell}:kv:<layout>:<hash>`, each with a TTL.

The key of a unit is there or it is not: that alone is the truth, whoever stored it. Beside it stand two keys that only
keep the budget: a sorted set of the units by the time they were stored, and the sum of their bytes. One script stores a
unit and makes room, oldest first. So this store knows which of the units it stored are gone, whoever removed them, by
one number: the time of the oldest that is left.

    stored by us, by time | gone: before the oldest left | there … |
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gpu_worker.tiers.port import OnChange, StoredUnit, ignore_change
from gpu_worker.tiers.redis_thread import RedisThread
from wire import keys
from wire.ids import UnitHash
from wire.plan import Tier

log = logging.getLogger("gpu_worker.tiers.redis")

RETRY_AFTER_S = 1.0
"""After an error Redis is not asked for so long: everything is a miss at once."""
ADOPTED_AT_MOST = 100_000
"""Units found at start."""
_AWAY = (RedisError, OSError, TimeoutError)
"""What a Redis that is gone, slow, starting or full raises."""

# KEYS: order, total. ARGV: value key's prefix, "<layout>:<hash>", payload, ttl in ms, budget in bytes.
# Answers: 1 when the unit is stored, its time, the oldest unit's time. Times are µs since 1970 on Redis's clock.
_STORE = """
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local prefix, name, ttl_ms, budget = ARGV[1], ARGV[2], tonumber(ARGV[4]), tonumber(ARGV[5])
local function bytes(member) return tonumber(string.match(member, '%d+$') or '0') end
local total = tonumber(redis.call('GET', KEYS[2]) or 'none')
if not total then
  total = 0
  for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do total = total + bytes(member) end
end
local function forget(member)
  redis.call('ZREM', KEYS[1], member)
  total = total - bytes(member)
end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now - ttl_ms * 1000, 'LIMIT', 0, 1000)) do
  forget(member)
end
local size = #ARGV[3]
local member = name .. ':' .. size
local stored = 0
if size <= budget then
  if redis.call('ZSCORE', KEYS[1], member) then forget(member) end
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  while oldest and total + size > budget do
    redis.call('UNLINK', prefix .. string.match(oldest, '^(.*):%d+$'))
    forget(oldest)
    oldest = redis.call('ZRANGE', KEYS[1], 0, 0)[1]
  end
  redis.call('SET', prefix .. name, ARGV[3], 'PX', ttl_ms)
  redis.call('ZADD', KEYS[1], string.format('%.0f', now), member)
  total = total + size
  stored = 1
end
redis.call('SET', KEYS[2], string.format('%.0f', total), 'PX', ttl_ms)
redis.call('PEXPIRE', KEYS[1], ttl_ms)
local first = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')
return {stored, string.format('%.0f', now), first[2] or '0'}
"""

# KEYS: order, total. ARGV: value key's prefix, then "<layout>:<hash>:<bytes>" of units that are not to be had any more.
_REMOVE = """
for i = 2, #ARGV do
  redis.call('UNLINK', ARGV[1] .. string.match(ARGV[i], '^(.*):%d+$'))
  if redis.call('ZREM', KEYS[1], ARGV[i]) == 1 and redis.call('EXISTS', KEYS[2]) == 1 then
    redis.call('DECRBY', KEYS[2], string.match(ARGV[i], '%d+$'))
  end
end
"""


class RedisStore:
    """Implements port.LowerStore: at most budget_bytes of units in the whole cell, each for ttl_s.

    redis: whoever reads waits for its timeout once, then RETRY_AFTER_S for nothing. Closed with the store.
    layout: codec's tag.
    """

    tier = Tier.REDIS

    def __init__(
        self,
        redis: RedisThread,
        *,
        cell: str,
        layout: str,
        encoded_bytes: int,
        budget_bytes: int,
        ttl_s: float,
        on_change: OnChange = ignore_change,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._layout = layout
        self._prefix = keys.kv_unit(cell, "")
        self._accounts = [keys.kv_order(cell), keys.kv_total(cell)]
        self._encoded_bytes = encoded_bytes
        self._budget_bytes = budget_bytes
        self._ttl_ms = round(ttl_s * 1000)
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.Lock()
        self._held: dict[UnitHash, float] = {}  # by the time it was stored
        self._by_age: list[tuple[float, UnitHash]] = []  # a heap; a unit that is held no more is skipped
        self._own: set[UnitHash] = set()
        self._unwanted: dict[UnitHash, None] = {}
        self._adopted = False
        self._retry_at_s = 0.0

    def put(self, unit_hash: UnitHash, encoded: memoryview) -> bool:
        """Called by one thread at a time."""
        if self._is_away():
            return False
        try:
            self._remove_unwanted()
            since = self._stored_since(unit_hash)
            if since is None:
                name = self._name(unit_hash)
                arguments: list[Any] = [self._prefix, name, encoded, self._ttl_ms, self._budget_bytes]
                stored, since, oldest = self._redis.ask(lambda redis: _run(redis, _STORE, self._accounts, arguments))
                if not stored:
                    return False
                self._forget_older_than(float(oldest))
        except _AWAY as error:
            self._went_away(error)
            return False
        with self._lock:
            self._own.add(unit_hash)
            self._hold(unit_hash, float(since))
        return True

    def get(self, unit_hash: UnitHash) -> StoredUnit | None:
        if self._is_away() or unit_hash in self._unwanted:
            return None
        try:
            value: Any = self._redis.ask(lambda redis: redis.get(self._key(unit_hash)))
        except _AWAY as error:
            self._went_away(error)
            return None
        if value is None:
            with self._lock:
                self._forget(unit_hash)
            return None
        return StoredUnit(memoryview(value))

    def holds(self, unit_hashes: Sequence[UnitHash]) -> list[bool]:
        """Redis is asked, so that what other workers stored is found too."""
        if self._is_away() or not unit_hashes:
            return [False] * len(unit_hashes)
        try:
            found = self._redis.ask(lambda redis: _exist(redis, [self._key(unit_hash) for unit_hash in unit_hashes]))
        except _AWAY as error:
            self._went_away(error)
            return [False] * len(unit_hashes)
        return [one and h not in self._unwanted for one, h in zip(found, unit_hashes, strict=True)]

    def drop(self, unit_hash: UnitHash) -> None:
        """Its key goes at the next put or upkeep."""
        with self._lock:
            self._forget(unit_hash)
            self._unwanted[unit_hash] = None

    def clear(self) -> None:
        """What other workers stored, or earlier lives of this one, stays. The keys go at the next put or upkeep."""
        with self._lock:
            for unit_hash in self._own & self._held.keys():
                self._forget(unit_hash)
                self._unwanted[unit_hash] = None

    def upkeep(self) -> None:
        if self._is_away():
            return
        try:
            self._adopt()
            self._remove_unwanted()
            now, oldest = self._redis.ask(lambda redis: _now_and_oldest(redis, self._accounts[0]))
        except _AWAY as error:
            self._went_away(error)
            return
        self._retry_at_s = 0.0
        self._forget_older_than(max(oldest, now - self._ttl_ms * 1000))

    def contents(self) -> list[UnitHash]:
        """What this worker stored, or found at start."""
        with self._lock:
            return list(self._held)

    @property
    def num_units(self) -> int:
        return len(self._held)

    @property
    def num_bytes(self) -> int:
        return len(self._held) * self._encoded_bytes

    def close(self) -> None:
        self._redis.close()

    def _key(self, unit_hash: UnitHash) -> str:
        return self._prefix + self._name(unit_hash)

    def _name(self, unit_hash: UnitHash) -> str:
        return f"{self._layout}:{unit_hash.hex()}"

    def _member(self, unit_hash: UnitHash) -> str:
        return f"{self._name(unit_hash)}:{self._encoded_bytes}"

    def _stored_since(self, unit_hash: UnitHash) -> float | None:
        """When a unit that is in Redis was stored, by anyone; None: it is not, or nobody counts it."""
        value, order, member = self._key(unit_hash), self._accounts[0], self._member(unit_hash)
        return self._redis.ask(lambda redis: _since(redis, value, order, member))

    def _adopt(self) -> None:
        """Once: units of this layout that lie there already."""
        if self._adopted:
            return
        order = self._accounts[0]
        found: Any = self._redis.ask(lambda redis: redis.zrange(order, 0, ADOPTED_AT_MOST - 1, withscores=True))
        with self._lock:
            for member, since in found:
                layout, _, rest = member.decode(errors="replace").partition(":")
                if layout == self._layout:
                    self._hold(UnitHash(bytes.fromhex(rest[:64])), since)
        self._adopted = True

    def _remove_unwanted(self) -> None:
        with self._lock:
            unwanted = list(self._unwanted)
        if unwanted:
            arguments = [self._prefix, *(self._member(unit_hash) for unit_hash in unwanted)]
            self._redis.ask(lambda redis: _run(redis, _REMOVE, self._accounts, arguments))
        with self._lock:
            for unit_hash in unwanted:
                del self._unwanted[unit_hash]

    def _hold(self, unit_hash: UnitHash, since: float) -> None:
        if unit_hash not in self._held:
            self._on_change(unit_hash, True)
        if self._held.get(unit_hash) != since:
            self._held[unit_hash] = since
            heapq.heappush(self._by_age, (since, unit_hash))

    def _forget(self, unit_hash: UnitHash) -> None:
        if self._held.pop(unit_hash, None) is not None:
            self._own.discard(unit_hash)
            self._on_change(unit_hash, False)

    def _forget_older_than(self, oldest: float) -> None:
        with self._lock:
            while self._by_age and self._by_age[0][0] < oldest:
                since, unit_hash = heapq.heappop(self._by_age)
                if self._held.get(unit_hash) == since:
                    self._forget(unit_hash)

    def _is_away(self) -> bool:
        return self._clock() < self._retry_at_s

    def _went_away(self, error: Exception) -> None:
        if self._retry_at_s == 0:
            log.warning("Redis is away: what it holds of KV is a miss meanwhile", extra={"error": repr(error)})
        self._retry_at_s = self._clock() + RETRY_AFTER_S


async def _run(redis: Redis, script: str, key_names: list[str], arguments: list[Any]) -> Any:
    return await redis.register_script(script)(key_names, arguments)


async def _exist(redis: Redis, key_names: list[str]) -> list[bool]:
    async with redis.pipeline(transaction=False) as pipe:
        for name in key_names:
            pipe.exists(name)
        return [bool(found) for found in await pipe.execute()]


async def _since(redis: Redis, value: str, order: str, member: str) -> float | None:
    async with redis.pipeline(transaction=False) as pipe:
        pipe.exists(value)
        pipe.zscore(order, member)
        is_there, since = await pipe.execute()
    return since if is_there else None


async def _now_and_oldest(redis: Redis, order: str) -> tuple[float, float]:
    """µs since 1970: Redis's clock, and when the oldest unit was stored; inf when there is none."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.time()
        pipe.zrange(order, 0, 0, withscores=True)
        (seconds, micros), oldest = await pipe.execute()
    return seconds * 1_000_000 + micros, oldest[0][1] if oldest else math.inf
