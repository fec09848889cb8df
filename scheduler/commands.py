"""What the engine wants done. The shell executes them in order; none of them reports back except as an event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from wire.entries import ChoiceReply, TerminalReply, TokensReply
from wire.ids import Epoch, GatewayId, RequestId, WorkerId
from wire.plan import StepPlan


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Send a plan on a worker's stream. Dropped if that session is already gone: WorkerDown will follow."""

    worker_id: WorkerId
    epoch: Epoch
    plan: StepPlan


@dataclass(slots=True)
class PublishReply:
    """Hand tokens, or the end of one choice, to the gateway that owns the request. Not frozen: one for every token."""

    gateway_id: GatewayId
    item: TokensReply | ChoiceReply


@dataclass(frozen=True, slots=True)
class RouteCandidate:
    """One worker's predicted cost for a request, in prefill-token equivalents, term by term."""

    worker_id: WorkerId
    uncached_tokens: float
    queued_prefill_tokens: float
    kv_pressure: float
    active_decodes: float

    @property
    def cost(self) -> float:
        return self.uncached_tokens + self.queued_prefill_tokens + self.kv_pressure + self.active_decodes


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence began (or began again) on a worker."""

    choice: int
    queued_s: float
    """When it entered the queue."""
    admitted_s: float
    worker_id: WorkerId
    cached_tokens: int
    candidates: tuple[RouteCandidate, ...]
    resumed: bool
    """After a preemption or a worker's death."""


@dataclass(slots=True)
class Timeline:
    """What happened to one request, on the engine's clock: the scheduler's spans are drawn from it."""

    arrived_s: float
    admissions: list[Admission] = field(default_factory=list)
    preempted_s: list[float] = field(default_factory=list)
    worker_lost_s: list[float] = field(default_factory=list)
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(frozen=True, slots=True)
class FinishRequest:
    """The request's one terminal: publish it, then close its journal and stream entry."""

    gateway_id: GatewayId
    request_id: RequestId
    terminal: TerminalReply
    timeline: Timeline


Command: TypeAlias = DispatchPlan | PublishReply | FinishRequest
