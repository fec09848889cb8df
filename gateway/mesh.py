"""What a gateway writes into its cell: requests, admitted by one script, and cancels."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from gateway.redis_link import REDIS_ERRORS, refused
from observability.metrics import GatewayMetrics
from wire import keys
from wire.entries import CancelEntry, RequestEntry
from wire.errors import InvalidRequest, Overloaded, Unavailable
from wire.ids import RequestId
from wire.journal import Journal
from wire.redis_pipe import Command, RedisPipe

log = logging.getLogger("gateway.mesh")

RETRY_S = 0.25
CANCEL_BATCH = 256
NO_LIMIT = 2**31
MIN_RETRY_AFTER_S = 1.0
SUBMIT_BATCH = 64
"""Submits that go to Redis in one round trip: all that came during the last one, so that a burst costs few."""

# All requests of one HTTP request get in, or none. A request already in the journal is left alone, and counts for
# nothing: adding is idempotent by id.
#   KEYS: live set, lane stream, then each request's journal
#   ARGV: most live requests, gateway, lane, then per request: id, arrived, v, body, prompt
_SUBMIT = """
local count, new = #KEYS - 2, 0
for i = 1, count do
  if redis.call('EXISTS', KEYS[i + 2]) == 0 then new = new + 1 end
end
if new > 0 and redis.call('SCARD', KEYS[1]) + new > tonumber(ARGV[1]) then return 0 end
for i = 1, count do
  local journal, at = KEYS[i + 2], i * 5 - 1
  if redis.call('EXISTS', journal) == 0 then
    redis.call('SADD', KEYS[1], ARGV[at])
    local entry = redis.call('XADD', KEYS[2], '*', 'v', ARGV[at + 2], 'body', ARGV[at + 3], 'prompt', ARGV[at + 4])
    redis.call('HSET', journal, 'gw', ARGV[2], 'lane', ARGV[3], 'entry', entry, 'arrived', ARGV[at + 1])
  end
end
return 1
"""


@dataclass(slots=True)
class _Submit:
    """Requests on their way, all or none of which get in."""

    keys: list[str]
    args: list[bytes | str | int | float]
    admitted: asyncio.Future[bool]

    @property
    def command(self) -> Command:
        return ("EVAL", _SUBMIT, len(self.keys), *self.keys, *self.args)


class Mesh:
    """Submits and cancels requests in one cell."""

    def __init__(
        self, redis: Redis, submit_redis: Redis, cell: str, max_live_requests: int, metrics: GatewayMetrics
    ) -> None:
        """`submit_redis` carries what comes in bursts, `redis` all that must not wait behind it."""
        self._redis = redis
        self._submit_pipe = RedisPipe(submit_redis)
        self._submits: deque[_Submit] = deque()  # one per request that is being handled
        self._submit_queued = asyncio.Event()
        self._cell = cell
        self._max_live_requests = max_live_requests
        self._metrics = metrics
        # Full → the oldest is dropped: its request then runs on to its own max_tokens, for nobody.
        self._cancels: deque[CancelEntry] = deque(maxlen=keys.CONTROL_MAX_ENTRIES)
        self._cancel_queued = asyncio.Event()

    def check_size(self, num_requests: int) -> None:
        """Raises InvalidRequest for more requests than the cell ever takes at once: waiting would not help."""
        if num_requests > self._max_live_requests:
            raise InvalidRequest(
                f"prompt: has {num_requests} prompts, but this server takes {self._max_live_requests} at once",
                param="prompt",
            )

    async def submit(self, entries: Sequence[RequestEntry], lane: str, *, predicted_drain_s: float) -> None:
        """Hand requests to the scheduler, all or none.

        Raises Overloaded when the cell has no room for them, and Unavailable when Redis did not answer or refused;
        they may then have been added nevertheless, so the caller cancels them.
        """
        waiting = self._submit_of(entries, lane, self._max_live_requests)
        self._submits.append(waiting)
        self._submit_queued.set()
        if not await waiting.admitted:
            raise Overloaded(
                f"{self._max_live_requests} requests are in the mesh already",
                retry_after_s=max(MIN_RETRY_AFTER_S, predicted_drain_s),
            )

    async def send_submits(self) -> None:
        """Send queued submits for ever, batch by batch."""
        while True:
            await self._submit_queued.wait()
            self._submit_queued.clear()
            while self._submits:
                queued = [self._submits.popleft() for _ in range(min(len(self._submits), SUBMIT_BATCH))]
                await self._send_batch([submit for submit in queued if not submit.admitted.done()])

    async def _send_batch(self, batch: Sequence[_Submit]) -> None:
        if not batch:
            return
        try:
            results = await self._run_submits(batch)
        except REDIS_ERRORS as error:
            batch = [*batch, *self._submits]  # those behind it would wait as long for the same
            self._submits.clear()
            results = [error] * len(batch)
        for failure in {str(result) for result in results if isinstance(result, Exception)}:
            log.warning("submit failed: %s", failure)
        for submit, result in zip(batch, results, strict=True):
            if submit.admitted.done():  # its handler waits no longer, and cancels what may have got in
                continue
            if isinstance(result, Exception):
                reason = "Redis refused the request" if refused(result) else "Redis is away"
                submit.admitted.set_exception(Unavailable(reason))
            else:
                submit.admitted.set_result(bool(result))

    async def resubmit(self, entry: RequestEntry, lane: str) -> None:
        """Add again what a restarted Redis may have lost; harmless if it did not. Raises redis-py's errors."""
        redis: Any = self._redis  # untyped
        await redis.execute_command(*self._submit_of([entry], lane, NO_LIMIT).command)

    async def _run_submits(self, batch: Sequence[_Submit]) -> list[Any]:
        """One result each, a ResponseError where Redis refused. Raises redis-py's other errors."""
        commands = [submit.command for submit in batch]
        was_open = self._submit_pipe.is_open
        try:
            return await self._submit_pipe.execute(commands)
        except RedisConnectionError:
            if not was_open:
                raise
        # It had broken unseen, perhaps long ago. What got in nevertheless is not added twice.
        return await self._submit_pipe.execute(commands)

    def _submit_of(self, entries: Sequence[RequestEntry], lane: str, limit: int) -> _Submit:
        names = [keys.live(self._cell), keys.requests(self._cell, lane)]
        args: list[bytes | str | int | float] = [limit, entries[0].gateway_id, lane]
        for entry in entries:
            names.append(keys.journal(self._cell, entry.request_id))
            fields = entry.encode()
            args += [entry.request_id, entry.arrived_unix_s, fields["v"], fields["body"], fields["prompt"]]
        return _Submit(names, args, asyncio.get_running_loop().create_future())

    def cancel(self, entry: CancelEntry) -> None:
        """Queue a cancel and return at once: no cancelled handler has to wait for it."""
        self._cancels.append(entry)
        self._cancel_queued.set()
        self._metrics.cancels.labels(entry.reason).inc()

    async def send_cancels(self) -> None:
        """Send queued cancels for ever; while Redis is away they wait."""
        while True:
            await self._cancel_queued.wait()
            try:
                await self.flush_cancels()
            except REDIS_ERRORS as error:
                log.warning("cancels wait for Redis: %s", error)
                await asyncio.sleep(RETRY_S)

    async def flush_cancels(self) -> None:
        """Send what is queued now. Raises redis-py's errors; what was not sent stays queued."""
        stream = keys.control(self._cell)
        while self._cancels:
            batch = [self._cancels.popleft() for _ in range(min(len(self._cancels), CANCEL_BATCH))]
            try:
                async with self._redis.pipeline(transaction=False) as pipe:
                    for entry in batch:
                        pipe.xadd(stream, cast(Any, entry.encode()), maxlen=keys.CONTROL_MAX_ENTRIES, approximate=True)
                    await pipe.execute()
            except BaseException:  # a cancel sent twice is harmless, one forgotten is not
                self._cancels.extendleft(reversed(batch))
                raise
        self._cancel_queued.clear()

    async def read_journal(self, request_id: RequestId) -> Journal:
        """An empty one when the request has none. Raises redis-py's errors and EntryMalformed."""
        raw: Any = await self._redis.hgetall(keys.journal(self._cell, request_id))
        return Journal.decode(raw)

    async def which_live(self, request_ids: Sequence[RequestId]) -> list[bool]:
        """Which of the requests have no terminal yet. Raises redis-py's errors."""
        flags = await self._redis.smismember(keys.live(self._cell), list(request_ids))
        return [bool(flag) for flag in flags]
