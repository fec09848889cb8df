"""Versioned entries of the Redis streams and hashes. Encoding is JSON, token ids are packed little-endian u32.

Every entry carries `v`; a reader refuses a version it does not know with EntryMalformed, and never guesses.
"""

from __future__ import annotations

import array
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from wire.body import I32, U32, U64, Body
from wire.errors import EntryMalformed
from wire.ids import Fence, GatewayId, RequestId, WorkerId
from wire.plan import Role
from wire.sampling import SamplingParams, TokenLogprobs

VERSION = 1

MAX_ID = 512
"""Characters of a request's, gateway's, worker's or tenant's name."""
MAX_CHOICES = 128
MAX_LOGPROBS = 1024
TINY = 5e-324
"""The smallest float above 0."""

RedisFields: TypeAlias = dict[str, bytes | str | int | float]
"""What XADD and HSET take."""


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
        body = Body.load(raw, VERSION, "request entry")
        if b"prompt" not in raw:
            raise EntryMalformed("request entry: prompt is missing")
        return cls(
            request_id=RequestId(body.text("id", max_length=MAX_ID)),
            gateway_id=GatewayId(body.text("gw", max_length=MAX_ID)),
            prompt=unpack_tokens(raw[b"prompt"]),
            sampling=_sampling(body.nested("sampling")),
            num_choices=body.integer("n", 1, MAX_CHOICES),
            tenant=body.text("tenant", max_length=MAX_ID),
            priority=body.integer("priority", -I32, I32),
            deadline_unix_s=None if body.is_null("deadline") else body.number("deadline"),
            arrived_unix_s=body.number("arrived"),
            salt=body.text("salt"),
            traceparent=body.text("traceparent", max_length=MAX_ID),
        )


def _sampling(body: Body) -> SamplingParams:
    return SamplingParams(
        max_tokens=body.integer("max_tokens", 1, I32),
        min_tokens=body.integer("min_tokens", 0, I32),
        temperature=body.number("temperature", 0.0),
        top_k=body.integer("top_k", 0, I32),
        top_p=body.number("top_p", TINY, 1.0),
        min_p=body.number("min_p", 0.0, 1.0),
        repetition_penalty=body.number("repetition_penalty", TINY),
        presence_penalty=body.number("presence_penalty"),
        frequency_penalty=body.number("frequency_penalty"),
        logit_bias=tuple(body.pairs("logit_bias", 0, U32)),
        seed=body.integer("seed", 0, U64),
        stop_token_ids=tuple(body.integers("stop_token_ids", 0, U32)),
        ignore_eos=body.boolean("ignore_eos"),
        logprobs=None if body.is_null("logprobs") else body.integer("logprobs", 0, MAX_LOGPROBS),
    )


@dataclass(frozen=True, slots=True)
class CancelEntry:
    """Stop a request, or one choice of it. A stop string is reason "stop": the gateway has the finish reason."""

    request_id: RequestId
    reason: str
    """"stop" | "disconnect" | "gateway_lost"."""
    choice: int | None = None
    """None: every choice."""

    def encode(self) -> RedisFields:
        return {"v": VERSION, "body": json.dumps({"id": self.request_id, "reason": self.reason, "choice": self.choice})}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> CancelEntry:
        body = Body.load(raw, VERSION, "control entry")
        return cls(
            RequestId(body.text("id", max_length=MAX_ID)),
            body.text("reason", max_length=MAX_ID),
            None if body.is_null("choice") else body.integer("choice", 0, I32),
        )


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
    transfer_s: float = 0.0
    """KV on its way from another worker or a lower tier while nothing of the request ran."""
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


_ALL_INTEGERS = frozenset({int})

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
        body = Body.load(raw, VERSION, "reply entry")
        rows = body.raw("items")
        if not isinstance(rows, list):
            raise EntryMalformed("reply entry: items must be a list")
        return cls(Fence(body.integer("fence", 0, U64)), [_plain_tokens(row) or _reply_item(row) for row in rows])


def _plain_tokens(row: Any) -> TokensReply | None:
    """_reply_item of the one kind of row that comes with every step, several times as fast; None for any other."""
    if type(row) is not list or len(row) != 6:
        return None
    kind, rid, choice, position, tokens, packed = row
    if kind != "t" or packed is not None or type(tokens) is not list or not _ALL_INTEGERS.issuperset(map(type, tokens)):
        return None
    if type(rid) is not str or type(choice) is not int or type(position) is not int:
        return None
    return TokensReply(rid, choice, position, tokens)  # type: ignore[arg-type]  # a NewType's call costs as much as this


def _reply_item(row: Any) -> ReplyItem:
    """One item. Types are matched, ranges are left to the reader, who knows the request."""
    match row:
        case ["t", str(rid), int(choice), int(position), [*tokens], packed] if all(type(t) is int for t in tokens):
            return TokensReply(RequestId(rid), choice, position, tokens, _logprobs(packed))
        case ["c", str(rid), int(choice), int(num_tokens), str(reason)]:
            return ChoiceReply(RequestId(rid), choice, num_tokens, reason)
        case ["e", str(rid), str() | None as code, str() | None as message, int() | float() | None as retry_s, stats]:
            return TerminalReply(RequestId(rid), code, message, retry_s, _stats(Body(stats, "reply entry: stats")))
    raise EntryMalformed("reply entry: unknown item")


def _logprobs(packed: Any) -> list[TokenLogprobs] | None:
    if packed is None:
        return None
    try:
        return [TokenLogprobs(float(logprob), list(ids), list(logprobs)) for logprob, ids, logprobs in packed]
    except (TypeError, ValueError) as error:
        raise EntryMalformed("reply entry: logprobs are not [logprob, ids, logprobs]") from error


def _stats(body: Body) -> RequestStats:
    return RequestStats(
        prompt_tokens=body.integer("prompt_tokens", 0, U32),
        cached_tokens=body.integer("cached_tokens", 0, U32),
        output_tokens=body.integer("output_tokens", 0, U32),
        queue_s=body.number("queue_s"),
        prefill_s=body.number("prefill_s"),
        transfer_s=body.number("transfer_s"),
        decode_s=body.number("decode_s"),
        stall_s=body.number("stall_s"),
        preemptions=body.integer("preemptions", 0, U32),
        worker_id=body.text("worker_id", max_length=MAX_ID),
    )


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """Where a worker listens. The scheduler learns the rest from its Hello."""

    worker_id: WorkerId
    address: str
    """host:port for gRPC."""
    epoch: int
    pid: int
    role: Role = Role.BOTH
    """Its own, which an operator's wish overrides."""

    def encode(self) -> RedisFields:
        return {"v": VERSION, "body": json.dumps(asdict(self))}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> WorkerEntry:
        body = Body.load(raw, VERSION, "worker entry")
        return cls(
            worker_id=WorkerId(body.text("worker_id", max_length=MAX_ID)),
            address=body.text("address", max_length=MAX_ID),
            epoch=body.integer("epoch", 0, U64),
            pid=body.integer("pid", 0, U32),
            role=_role(body),
        )


def _role(body: Body) -> Role:
    name = body.text("role", max_length=MAX_ID)
    try:
        return Role(name)
    except ValueError as error:
        raise EntryMalformed(f"role {name!r}, not one of {', '.join(Role)}") from error


@dataclass(frozen=True, slots=True)
class CellWorker:
    """A worker as its scheduler has it."""

    worker_id: WorkerId
    role: Role
    """In force: its own, or what an operator wished."""
    running: int
    """Sequences."""

    @classmethod
    def of(cls, body: Body) -> CellWorker:
        return cls(WorkerId(body.text("worker_id", max_length=MAX_ID)), _role(body), body.integer("running", 0, U32))


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
    workers: list[CellWorker] = field(default_factory=list)
    """The live ones, for operators."""

    def encode(self) -> RedisFields:
        return {"v": VERSION, "body": json.dumps(asdict(self))}

    @classmethod
    def decode(cls, raw: dict[bytes, bytes]) -> CellCard:
        body = Body.load(raw, VERSION, "cell card")
        return cls(
            model_name=body.text("model_name"),
            model_revision=body.text("model_revision"),
            vocab_size=body.integer("vocab_size", 0, U32),
            max_model_len=body.integer("max_model_len", 0, U32),
            max_request_tokens=body.integer("max_request_tokens", 0, U64),
            eos_token_ids=body.integers("eos_token_ids", 0, U32),
            num_workers=body.integer("num_workers", 0, U32),
            fence=body.integer("fence", 0, U64),
            predicted_drain_s=body.number("predicted_drain_s", 0.0),
            workers=[CellWorker.of(worker) for worker in body.nested_list("workers")],
        )
