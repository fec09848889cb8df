"""What the journals in Redis lack yet, and the fenced scripts that write them (design §7).

wire.journal has the format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

from wire import keys
from wire.entries import ChoiceReply, RedisFields, TerminalReply, TokensReply, pack_tokens
from wire.ids import Fence, RequestId
from wire.journal import TAIL, TERMINAL, encode_finish, encode_terminal, finish_field, output_field

ScriptArgs: TypeAlias = list[bytes | str | int | float]

FLUSH_TOKENS: Final = 16
FLUSH_AFTER_S: Final = 1.0

# A fence that is no string is none of ours: pcall.
# KEYS fence, journal; ARGV our fence, then field, value, … Returns 0 when fenced out.
APPEND: Final = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], unpack(ARGV, 2))
return 1
"""

# KEYS fence, journal, live, lane; ARGV our fence, group, entry id, request id, retention_s, then field, value, …
# Running it twice changes nothing. Returns 0 when fenced out.
END: Final = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[2], unpack(ARGV, 6))
redis.call('EXPIRE', KEYS[2], ARGV[5])
redis.call('SREM', KEYS[3], ARGV[4])
redis.call('XACK', KEYS[4], ARGV[2], ARGV[3])
redis.call('XDEL', KEYS[4], ARGV[3])
return 1
"""

# As END, but for the journal, and whatever the keys hold: for a request whose END was refused.
# KEYS fence, live, lane; ARGV our fence, group, entry id, request id. Returns 0 when fenced out.
REMOVE: Final = """
if redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.pcall('SREM', KEYS[2], ARGV[4])
redis.pcall('XACK', KEYS[3], ARGV[2], ARGV[3])
redis.pcall('XDEL', KEYS[3], ARGV[3])
return 1
"""


@dataclass(slots=True)
class _Piece:
    position: int
    tokens: list[int]


@dataclass(slots=True)
class _Draft:
    """Published output of one request that its journal lacks."""

    since_s: float
    outputs: dict[int, _Piece] = field(default_factory=dict)  # by choice
    finishes: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0
    tail: bytes | None = None

    def fields(self) -> RedisFields:
        written: RedisFields = {
            output_field(choice, piece.position): pack_tokens(piece.tokens) for choice, piece in self.outputs.items()
        }
        written.update({finish_field(choice): value for choice, value in self.finishes.items()})
        if self.tail is not None:
            written[TAIL] = self.tail
        return written


class JournalDrafts:
    """Collects what was published until it is due for the journal: FLUSH_TOKENS tokens or FLUSH_AFTER_S.

    One task owns it: nothing is noted between fields() and written().
    """

    def __init__(self) -> None:
        self._drafts: dict[RequestId, _Draft] = {}  # oldest first: one that was written begins anew, at the end
        self._full: dict[RequestId, None] = {}  # those with FLUSH_TOKENS tokens

    def note(self, item: TokensReply | ChoiceReply, reply_id: bytes | None, now: float) -> None:
        """Take an item that was published under reply_id, or None: its gateway's stream refused it. It is ours all
        the same: a piece has no gaps."""
        draft = self._drafts.setdefault(item.request_id, _Draft(since_s=now))
        draft.tail = reply_id or draft.tail
        match item:
            case TokensReply(_, choice, position, tokens):
                piece = draft.outputs.setdefault(choice, _Piece(position, []))
                piece.tokens += tokens
                draft.num_tokens += len(tokens)
                if draft.num_tokens >= FLUSH_TOKENS:
                    self._full[item.request_id] = None
            case ChoiceReply(_, choice, num_tokens, reason):
                draft.finishes[choice] = encode_finish(num_tokens, reason)

    def due(self, now: float) -> list[RequestId]:
        due = dict(self._full)
        for request_id, draft in self._drafts.items():
            if now - draft.since_s < FLUSH_AFTER_S:
                break
            due[request_id] = None
        return list(due)

    def next_due_s(self) -> float | None:
        """When the oldest draft is due by age; None without a draft."""
        oldest = next(iter(self._drafts.values()), None)
        return None if oldest is None else oldest.since_s + FLUSH_AFTER_S

    def fields(self, request_id: RequestId) -> RedisFields:
        """What the journal lacks; empty when nothing."""
        draft = self._drafts.get(request_id)
        return draft.fields() if draft else {}

    def written(self, request_id: RequestId) -> None:
        self._drafts.pop(request_id, None)
        self._full.pop(request_id, None)


def append_call(cell: str, fence: Fence, request_id: RequestId, fields: RedisFields) -> ScriptArgs:
    """Arguments of EVAL that add fields to a journal."""
    return [APPEND, 2, keys.fence(cell), keys.journal(cell, request_id), fence, *_flat(fields)]


def end_call(
    cell: str, fence: Fence, lane: str, entry_id: bytes, terminal: TerminalReply, fields: RedisFields
) -> ScriptArgs:
    """Arguments of EVAL that write the last fields and the terminal, and remove the request from its lane."""
    request_id = terminal.request_id
    key_names = [
        keys.fence(cell),
        keys.journal(cell, request_id),
        keys.live(cell),
        keys.requests(cell, lane),
    ]
    settings: ScriptArgs = [fence, keys.SCHEDULER_GROUP, entry_id, request_id, keys.JOURNAL_RETENTION_S]
    written = {**fields, TERMINAL: encode_terminal(fence, terminal)}
    return [END, len(key_names), *key_names, *settings, *_flat(written)]


def remove_call(cell: str, fence: Fence, lane: str, entry_id: bytes, request_id: RequestId) -> ScriptArgs:
    """Arguments of EVAL that remove a request from its lane and leave its journal alone."""
    key_names = [keys.fence(cell), keys.live(cell), keys.requests(cell, lane)]
    return [REMOVE, len(key_names), *key_names, fence, keys.SCHEDULER_GROUP, entry_id, request_id]


def _flat(fields: RedisFields) -> ScriptArgs:
    return [part for pair in fields.items() for part in pair]
