"""The lease that makes one scheduler of a cell the active one, and its fencing number (design §9)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from redis.asyncio import Redis

from scheduler.redis_io import REDIS_ERRORS, Patience
from wire import keys
from wire.errors import FenceLost
from wire.ids import Fence

log = logging.getLogger(__name__)

POLL_S: Final = 0.25
"""A standby looks this often, and as soon as the lease it saw must lapse."""

# The fence is above every earlier one even when Redis lost its data or holds junk, which is overwritten: it is at least
# the time in milliseconds. Above 2^53 - 1 a script cannot count. A lease of our own is left from a fence that was lost.
# KEYS lease, fence; ARGV holder, ttl_ms, highest fence we know. Returns {fence, 0} or {0, ms until it lapses}.
_ACQUIRE: Final = """
local holder = redis.pcall('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  return {0, redis.call('PTTL', KEYS[1])}
end
local found = redis.pcall('GET', KEYS[2])
local last = 0
if type(found) == 'string' and #found <= 16 and string.find(found, '^%d+$') and tonumber(found) < 2^53 - 1 then
  last = tonumber(found)
end
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local fence = math.max(last, tonumber(ARGV[3]), now_ms) + 1
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], string.format('%.0f', fence))
return {fence, 0}
"""

# A lease that lapsed, or vanished with Redis's data, is taken up again if nobody was fenced in since.
# KEYS lease, fence; ARGV holder, ttl_ms, our fence.
_RENEW: Final = """
local holder = redis.pcall('GET', KEYS[1])
local fence = redis.pcall('GET', KEYS[2])
if (holder and holder ~= ARGV[1]) or (fence and fence ~= ARGV[3]) then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('SET', KEYS[2], ARGV[3])
return 1
"""

# KEYS lease; ARGV holder.
_RELEASE: Final = """
if redis.pcall('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""


class Lease:
    """Held by one process at a time. After its holder's death it lapses within ttl_s."""

    def __init__(self, redis: Redis, cell: str, holder: str, *, ttl_s: float = keys.SCHEDULER_LEASE_TTL_S) -> None:
        """holder must be unique to this process."""
        self._redis = redis
        self._holder = holder
        self._ttl_s = ttl_s
        self._lease_key = keys.lease(cell)
        self._fence_key = keys.fence(cell)
        self.fence = Fence(0)
        """Of the last time we held it."""

    async def acquire(self) -> Fence:
        """Wait until the lease is ours, however long; returns its fence, higher than any before."""
        patience = Patience(log, "acquiring the lease")
        while True:
            try:
                fence, lapses_ms = await self._eval(
                    _ACQUIRE, [self._lease_key, self._fence_key], self._holder, self._ttl_ms, self.fence
                )
            except REDIS_ERRORS as error:
                await patience.after(error)
                continue
            patience.success()
            if fence:
                self.fence = Fence(fence)
                log.info("lease acquired", extra={"fence": fence})
                return self.fence
            await asyncio.sleep(min(POLL_S, max(lapses_ms, 1) / 1000))

    async def keep(self) -> None:
        """Renew every third of the TTL, for ever. Raises FenceLost when another scheduler is active.

        While Redis is away the lease counts as held: who could take it would fence us out.
        """
        patience = Patience(log, "renewing the lease")
        while True:
            try:
                await self.confirm()
            except REDIS_ERRORS as error:
                await patience.after(error)
                continue
            patience.success()
            await asyncio.sleep(self._ttl_s / 3)

    async def confirm(self) -> None:
        """Renew once. Raises FenceLost, or what Redis raises."""
        if not await self._eval(_RENEW, [self._lease_key, self._fence_key], self._holder, self._ttl_ms, self.fence):
            raise FenceLost(f"fence {self.fence}: another scheduler is active")

    async def release(self) -> None:
        """Let a successor start at once. Quiet when Redis is away: the lease then lapses by itself."""
        try:
            await self._eval(_RELEASE, [self._lease_key], self._holder)
        except REDIS_ERRORS as error:
            log.warning("lease not released, it lapses in %.0f s: %r", self._ttl_s, error)

    @property
    def _ttl_ms(self) -> int:
        return int(self._ttl_s * 1000)

    async def _eval(self, script: str, key_names: list[str], *args: str | int) -> Any:
        return await self._redis.eval(script, len(key_names), *key_names, *args)
