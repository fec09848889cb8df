"""The prefix index in Redis: one hash per worker epoch, whose fields are unit hashes (design §5).

    {cell}:px:<worker>:<epoch>      unit hash (32 bytes) ─▸ its tiers' letters, fastest first, as in prefix_index.py
                                    lapses with the worker's lease, renewed by the worker's heartbeat

A lookup is one script: for each worker it gallops along the chain until a unit is missing. Where the
server refuses scripts, the same is done by pipelines, a round trip for each stretch. Fields and values that are not
ours are never counted, and a key that is no hash is as good as none and left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import NoPermissionError, NoScriptError, ResponseError, WatchError

from kvstore.prefix_index import TIERS_OF, UNIT_HASH_BYTES, VALUE_OF, Holder, Tiers
from kvstore.prefix_twin import TierPrefix
from wire import keys
from wire.errors import FenceLost
from wire.ids import Fence, UnitHash
from wire.plan import Tier

FIRST_STRETCH: Final = 16
GROWTH: Final = 4
MAX_STRETCH: Final = 1024
"""Units asked for at a time: 16, 64, 256, then 1024. Lua takes fewer than 8000 arguments."""
EXACT_UNITS: Final = 512
"""Units of all workers together that a script reads one by one, unless it is to be exact. A prefix that goes on is then
followed by the last unit of each BLOCK_UNITS: a missing one between two that are there is overlooked. KV is evicted
from a chain's end, so that is rare, and a pull that meets it ends there."""
BLOCK_UNITS: Final = 16
MAX_CHAIN: Final = 8192
"""Units of a chain that are looked up, 131,072 tokens: it bounds how long the script holds up the server."""
MAX_COMMAND_UNITS: Final = 512
"""Units in one HSET or HDEL."""
SCAN_UNITS: Final = 1000
"""Asked for in one HSCAN."""

_LEVELS: Final = {
    value: 1 if Tier.DEVICE in tiers else 2 if Tier.HOST in tiers else 3 for value, tiers in TIERS_OF.items()
}
"""Value of a unit → 1: counts for the device's prefix and all others, 2: for the host's and any, 3: for any."""


# KEYS a hash for each worker; ARGV the chain. Returns for each its prefixes: device, host, any tier.
#   unit by unit, until EXACT_UNITS were read for all workers together; then
#   | 1 … 16 | 17 … 32 | …    by each block's last unit, and unit by unit only in blocks where that one is missing
# Mostly a whole stretch lies on the device, and then concat says so without a look at each unit. It fails where one
# is missing.
def _lookup_script(exact_units: str) -> str:
    return f"""
local levels = {{{", ".join(f"{value.decode()}={level}" for value, level in _LEVELS.items())}}}
local prefixes = {{}}
local num_read = 0
for k = 1, #KEYS do
  local ends, level = {{}}, 0
  local function read(...)
    local values = redis.pcall('HMGET', KEYS[k], ...)
    if values.err then
      ends, level = {{0, 0, 0}}, 3
      return {{}}
    end
    num_read = num_read + #values
    return values
  end
  local function take(values, first)
    local all_there, joined = pcall(table.concat, values)
    if all_there and level == 0 and joined == string.rep('d', #values) then
      return
    end
    for i = 1, #values do
      local here = levels[values[i]] or 4
      while level < 3 and here > level + 1 do
        level = level + 1
        ends[level] = first + i - 2
      end
    end
  end
  local first, size = 1, {FIRST_STRETCH}
  while level < 3 and first <= #ARGV do
    local last_of_blocks = {{}}
    if num_read >= {exact_units} then
      for last = first + {BLOCK_UNITS - 1}, math.min(first + size - 1, #ARGV), {BLOCK_UNITS} do
        last_of_blocks[#last_of_blocks + 1] = ARGV[last]
      end
    end
    if #last_of_blocks == 0 then
      local last = math.min(first + size - 1, #ARGV)
      take(read(unpack(ARGV, first, last)), first)
      first = last + 1
    else
      local values = read(unpack(last_of_blocks))
      for i = 1, #values do
        if level < 3 and (levels[values[i]] or 4) > level + 1 then
          take(read(unpack(ARGV, first, first + {BLOCK_UNITS - 1})), first)
        end
        first = first + {BLOCK_UNITS}
      end
    end
    size = math.min(size * {GROWTH}, {MAX_STRETCH})
  end
  for l = 1, 3 do
    prefixes[#prefixes + 1] = ends[l] or #ARGV
  end
end
return prefixes
"""


_LOOKUP: Final = _lookup_script(str(EXACT_UNITS))
_EXACT_LOOKUP: Final = _lookup_script("math.huge")


class RedisPrefixIndex:
    """A PrefixIndex. `redis` may be of any kind that wire.redis_client opens; all keys are on the cell's slot."""

    def __init__(
        self, redis: Redis, cell: str, *, fence: Fence | None = None, scripts: bool = True, exact: bool = False
    ) -> None:
        """fence: of the lease under which it writes; without one it only reads. scripts: False never sends one.
        exact: read every unit, as is done without scripts anyway; else see EXACT_UNITS."""
        self._redis = redis
        self._cell = cell
        self._fence = fence
        self._scripts = scripts
        self._lookup = _EXACT_LOOKUP if exact else _LOOKUP
        self._lookup_sha = hashlib.sha1(self._lookup.encode()).hexdigest()

    async def lookup(self, chain: Sequence[UnitHash], holders: Sequence[Holder]) -> dict[Holder, TierPrefix]:
        """One round trip, or where scripts are off, one for each stretch; MAX_CHAIN units at most are looked up."""
        chain = chain[:MAX_CHAIN]
        if not chain or not holders:
            return {}
        prefixes = await self._lookup_by_script(chain, holders) if self._scripts else None
        if prefixes is None:
            prefixes = await self._lookup_by_pipelines(chain, holders)
        return {holder: prefix for holder, prefix in zip(holders, prefixes, strict=True) if prefix.any_tier}

    async def _lookup_by_script(self, chain: Sequence[UnitHash], holders: Sequence[Holder]) -> list[TierPrefix] | None:
        """None from a server that refuses scripts: then no more are sent."""
        args: list[Any] = [len(holders), *(self._key(holder) for holder in holders), *chain]
        redis: Any = self._redis
        try:
            try:
                flat = await redis.evalsha(self._lookup_sha, *args)
            except NoScriptError:
                flat = await redis.eval(self._lookup, *args)
        except ResponseError as error:
            if not _refuses_scripts(error):
                raise
            self._scripts = False
            return None
        return [TierPrefix(*flat[i : i + 3]) for i in range(0, len(flat), 3)]

    async def _lookup_by_pipelines(self, chain: Sequence[UnitHash], holders: Sequence[Holder]) -> list[TierPrefix]:
        walks = [_Walk() for _ in holders]
        first, size = 0, FIRST_STRETCH
        while first < len(chain):
            going = [i for i, walk in enumerate(walks) if walk.goes_on]
            if not going:
                break
            stretch: Any = chain[first : first + size]  # its list type is invariant
            async with self._redis.pipeline(transaction=False) as pipe:
                for i in going:
                    pipe.hmget(self._key(holders[i]), stretch)
                results = await pipe.execute(raise_on_error=False)
            for i, values in zip(going, results, strict=True):
                walks[i].take([None] if _is_no_hash(values) else values)
            first, size = first + size, min(size * GROWTH, MAX_STRETCH)
        return [walk.prefix() for walk in walks]

    async def write(self, holder: Holder, units: Mapping[UnitHash, Tiers], *, anew: bool = False) -> bool:
        """One transaction. Raises ResponseError when the key is no hash: it is not ours, and stays as it is."""
        key = self._key(holder)
        there = [(unit_hash, VALUE_OF[tiers]) for unit_hash, tiers in units.items() if tiers]
        gone: list[Any] = [unit_hash for unit_hash, tiers in units.items() if not tiers]
        async with self._redis.pipeline() as pipe:
            kind = await self._begin(pipe, key)
            if anew:
                pipe.unlink(key)
                gone = []
            for start in range(0, len(there), MAX_COMMAND_UNITS):
                pipe.hset(key, items=[part for pair in there[start : start + MAX_COMMAND_UNITS] for part in pair])
            for start in range(0, len(gone), MAX_COMMAND_UNITS):
                pipe.hdel(key, *gone[start : start + MAX_COMMAND_UNITS])
            if units:
                pipe.pexpire(key, int(keys.WORKER_LEASE_TTL_S * 1000))  # then the heartbeat keeps it
            await _execute(pipe)
        return kind == b"hash"

    async def drop(self, holder: Holder) -> None:
        key = self._key(holder)
        async with self._redis.pipeline() as pipe:
            await self._begin(pipe, key)
            pipe.unlink(key)
            await _execute(pipe)

    async def units(self, holder: Holder) -> AsyncIterator[dict[UnitHash, Tiers]]:
        key = self._key(holder)
        redis: Any = self._redis  # redis-py types a reply by everything any server may say
        cursor = 0
        while True:
            cursor, fields = await redis.hscan(key, cursor, count=SCAN_UNITS)
            ours = {
                UnitHash(name): TIERS_OF[value]
                for name, value in fields.items()
                if len(name) == UNIT_HASH_BYTES and value in TIERS_OF
            }
            if ours:
                yield ours
            if not cursor:
                return

    async def _begin(self, pipe: Pipeline, key: str) -> bytes:
        """Begin a transaction that fails when the fence changes; returns the type of what is at the key."""
        fence_key = keys.fence(self._cell)
        immediate: Any = pipe  # a watching pipeline answers at once, which its types do not know
        await immediate.watch(fence_key)
        fence: bytes | None = await immediate.get(fence_key)
        kind: bytes = await immediate.type(key)
        if self._fence is None or fence != str(self._fence).encode():
            raise FenceLost(f"fence {self._fence}: Redis has {fence!r}")
        if kind not in (b"hash", b"none"):
            raise ResponseError(f"WRONGTYPE {key} is a {kind.decode()}, not ours")
        immediate.multi()
        return kind

    def _key(self, holder: Holder) -> str:
        return keys.prefixes(self._cell, holder.worker_id, holder.epoch)


class _Walk:
    """How far one worker's prefixes go, stretch by stretch. As the script does it."""

    def __init__(self) -> None:
        self._length = 0
        self._ends: list[int] = []  # of the device's prefix, then the host's, then any tier's

    @property
    def goes_on(self) -> bool:
        return len(self._ends) < 3

    def take(self, values: Sequence[bytes | None]) -> None:
        for value in values:
            level = 4 if value is None else _LEVELS.get(value, 4)
            self._ends += [self._length] * (level - 1 - len(self._ends))
            if not self.goes_on:
                return
            self._length += 1

    def prefix(self) -> TierPrefix:
        return TierPrefix(*self._ends, *[self._length] * (3 - len(self._ends)))


async def _execute(pipe: Pipeline) -> None:
    try:
        await pipe.execute()
    except WatchError as error:
        raise FenceLost("the fence changed while the prefix index was written") from error


def _is_no_hash(values: Any) -> bool:
    """Of a pipeline's result. Raises what concerns the server."""
    if isinstance(values, ResponseError):
        if not str(values).startswith("WRONGTYPE"):
            raise values
        return True
    return False


def _refuses_scripts(error: ResponseError) -> bool:
    """No EVAL on this server, or not for us."""
    return isinstance(error, NoPermissionError) or str(error).lower().startswith("unknown command")
