"""Versioned entries of the Redis streams and hashes. Encoding is JSON, token ids are packed little-endian u32.

Every entry carries `v`; a reader refuses a version it does not know with EntryMalformed, and never guesses.
"""

from __future__ import annotations

import array
import json
import sys
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

from wire.errors import EntryMalformed
from wire.ids import Fence, GatewayId, RequestId, WorkerId
from wire.sampling import SamplingParams, TokenLogprobs

VERSION = 1

RedisFields: TypeAlias = dict[str, bytes | str | int | float]
"""What XADD and HSET take."""

_MISSHAPEN = (KeyError, TypeError, ValueError, OverflowError)
"""What building a record from a body of the wrong shape raises; OverflowError: JSON's Infinity as an int."""


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array.array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """Inverse of pack_tokens; raises EntryMalformed when the length is not a multiple of 4."""
    packed = array.array("I")
    try:
        packed.frombytes(data)
    except ValueError as error:
        raise EntryMalformed(f"packed tokens: {len(data)} bytes is not a multiple of 4") from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()


def _load(raw: dict[bytes, bytes], what: str) -> dict[str, Any]:
    """The JSON body of an entry whose version we know."""
    version = raw.get(b"v")
    if version != str(VERSION).encode():
        raise EntryMalformed(f"{what}: version {version!r}, this build reads {VERSION}")
    try:
        body = json.loads(raw[b"body"])
    except (KeyError, ValueError, RecursionError) as error:
        raise EntryMalformed(f"{what}: body missing or not JSON") from error
    if not isinstance(body, dict):
        raise EntryMalformed(f"{what}: body is not an object")
    return body


@dataclass(frozen=True, slots=True)
class RequestEntry:
    """A request as the gateway hands it over: token ids, never text."""

    request_id: RequestId
    gateway_id: GatewayId
    prompt: list[int]
    sampling: SamplingParams
    num_choices: int = 1
    tenant: str = "default"
    priority: int = 0
    """Higher goes first within its tenant."""
    deadline_unix_s: float | None = None
    arrived_unix_s: float = 0.0
    salt: str = ""
    """Isolates the prefix cache; part of the root hash."""
    traceparent: str = ""

    def encode(self) -> RedisFields:
        body = {
            "id": self.request_id,
            "gw": self.gateway_id,
            "sampling": asdict(self.sampling),
            "n": self.num_choices,
            "tenant": self.tenant,
            "priority": self.priority,
            "deadline": self.deadline_unix_s,
            "arrived": self.arrived_unix_s,
            "salt": self.salt,
            "traceparent": self.traceparent,
        }
        return {"v": VERSION, "body": json.dumps(body), "prompt": pack_tokens(self.prompt)}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> RequestEntry:
        body = _load(raw, "request entry")
        try:
            sampling = dict(body["sampling"])
            sampling["logit_bias"] = tuple((int(t), float(b)) for t, b in sampling["logit_bias"])
            sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
            return cls(
                request_id=RequestId(body["id"]),
                gateway_id=GatewayId(body["gw"]),
                prompt=unpack_tokens(raw[b"prompt"]),
                sampling=SamplingParams(**sampling),
                num_choices=int(body["n"]),
                tenant=str(body["tenant"]),
                priority=int(body["priority"]),
                deadline_unix_s=body["deadline"],
                arrived_unix_s=float(body["arrived"]),
                salt=str(body["salt"]),
                traceparent=str(body["traceparent"]),
            )
        except _MISSHAPEN as error:
            raise EntryMalformed(f"request entry: {error!r}") from error


@dataclass(frozen=True, slots=True)
class CancelEntry:
    """Stop a request, or one choice of it. A stop string is reason "stop": the gateway keeps `keep` tokens."""

    request_id: RequestId
    reason: str
    """"stop" | "disconnect" | "gateway_lost"."""
    choice: int | None = None
    """None: every choice."""

    def encode(self) -> RedisFields:
        return {"v": VERSION, "body": json.dumps({"id": self.request_id, "reason": self.reason, "choice": self.choice})}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> CancelEntry:
        body = _load(raw, "control entry")
        try:
            choice = body["choice"]
            return cls(RequestId(body["id"]), str(body["reason"]), None if choice is None else int(choice))
        except _MISSHAPEN as error:
            raise EntryMalformed(f"control entry: {error!r}") from error


@dataclass(slots=True)
class TokensReply:
    """Output tokens [position, position + len(tokens)) of one choice."""

    request_id: RequestId
    choice: int
    position: int
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class ChoiceReply:
    """One choice is over: `num_tokens` is its whole output. The worker's reason; the gateway may know better."""

    request_id: RequestId
    choice: int
    num_tokens: int
    finish_reason: str


@dataclass(slots=True)
class RequestStats:
    """Where a request's time went, as the scheduler saw it. Seconds; unix times where named so."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    stall_s: float = 0.0
    preemptions: int = 0
    worker_id: str = ""


@dataclass(slots=True)
class TerminalReply:
    """The request is over, exactly once: error_code is None when every choice finished by itself."""

    request_id: RequestId
    error_code: str | None = None
    error_message: str | None = None
    retry_after_s: float | None = None
    stats: RequestStats = field(default_factory=RequestStats)


ReplyItem: TypeAlias = TokensReply | ChoiceReply | TerminalReply


@dataclass(frozen=True, slots=True)
class ReplyEntry:
    """One XADD: everything one report gave one gateway, in order. No items: a fence marker."""

    fence: Fence
    items: list[ReplyItem]

    def encode(self) -> RedisFields:
        rows: list[list[Any]] = []
        for item in self.items:
            match item:
                case TokensReply(rid, choice, position, tokens, logprobs):
                    packed = None
                    if logprobs is not None:
                        packed = [[lp.logprob, lp.top_ids, lp.top_logprobs] for lp in logprobs]
                    rows.append(["t", rid, choice, position, tokens, packed])
                case ChoiceReply(rid, choice, num_tokens, reason):
                    rows.append(["c", rid, choice, num_tokens, reason])
                case TerminalReply(rid, code, message, retry_after_s, stats):
                    rows.append(["e", rid, code, message, retry_after_s, asdict(stats)])
        return {"v": VERSION, "body": json.dumps({"fence": self.fence, "items": rows}, separators=(",", ":"))}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> ReplyEntry:
        body = _load(raw, "reply entry")
        try:
            return cls(Fence(int(body["fence"])), [_reply_item(row) for row in body["items"]])
        except _MISSHAPEN as error:
            raise EntryMalformed(f"reply entry: {error!r}") from error


def _reply_item(row: list[Any]) -> ReplyItem:
    match row:
        case ["t", rid, choice, position, tokens, packed]:
            logprobs = None if packed is None else [TokenLogprobs(*lp) for lp in packed]
            return TokensReply(rid, choice, position, tokens, logprobs)
        case ["c", rid, choice, num_tokens, reason]:
            return ChoiceReply(rid, choice, num_tokens, reason)
        case ["e", rid, code, message, retry_after_s, stats]:
            return TerminalReply(rid, code, message, retry_after_s, RequestStats(**stats))
    raise EntryMalformed(f"reply entry: unknown item {row[:2]!r}")


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """Where a worker listens. The scheduler learns the rest from its Hello."""

    worker_id: WorkerId
    address: str
    """host:port for gRPC."""
    epoch: int
    pid: int

    def encode(self) -> RedisFields:
        return {"v": VERSION, "body": json.dumps(asdict(self))}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> WorkerEntry:
        return cls(**_known_fields(cls, _load(raw, "worker entry"), "worker entry"))


@dataclass(frozen=True, slots=True)
class CellCard:
    """What a gateway must know of a cell to admit a request, written by its active scheduler with each heartbeat."""

    model_name: str
    model_revision: str
    vocab_size: int
    max_model_len: int
    max_request_tokens: int
    """prompt + max_tokens that the largest usable KV pool can hold."""
    eos_token_ids: list[int]
    num_workers: int
    """Live ones; 0 makes the gateway not ready."""
    fence: int
    predicted_drain_s: float = 0.0
    """How long the backlog takes: Retry-After of a 429."""

    def encode(self) -> RedisFields:
        return {"v": VERSION, "body": json.dumps(asdict(self))}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> CellCard:
        return cls(**_known_fields(cls, _load(raw, "cell card"), "cell card"))


def _known_fields(cls: type[Any], body: dict[str, Any], what: str) -> dict[str, Any]:
    names = {f.name for f in fields(cls)}
    if names - body.keys():
        raise EntryMalformed(f"{what}: missing {sorted(names - body.keys())}")
    return {name: body[name] for name in names}
