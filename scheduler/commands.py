"""What the engine wants done. The shell executes them in order; none of them reports back except as an event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from wire.entries import ChoiceReply, TerminalReply, TokensReply
from wire.ids import Epoch, GatewayId, RequestId, UnitHash, WorkerId
from wire.plan import Role, StepPlan, Tier


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
    pulled_tokens: float = 0.0
    """What a pull would bring; no part of the cost, and no part of uncached_tokens either."""
    pull_cost_tokens: float = 0.0
    """How long that pull takes by prediction, in tokens prefilled meanwhile."""
    pull_source: str = ""
    """The worker pulled from: its own id for its lower tiers, empty for no pull."""
    predicted_prefill_s: float = 0.0
    """For the tokens of the best pull that there was, were they prefilled here; for all uncached ones without any."""
    predicted_pull_s: float = 0.0
    """For that pull, taken or not; 0: nothing to pull. Above predicted_prefill_s it is not taken."""
    disturbed_decodes: float = 0.0
    """What prefilling here takes from the decodes beside it; counted where other workers only prefill."""

    @property
    def cost(self) -> float:
        return (
            self.uncached_tokens
            + self.queued_prefill_tokens
            + self.kv_pressure
            + self.active_decodes
            + self.pull_cost_tokens
            + self.disturbed_decodes
        )


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
    pulled_tokens: int = 0
    """Ordered from elsewhere; whether they came is in the transfer."""
    pull_source: WorkerId | None = None
    predicted_cached_tokens: int = 0
    """What routing counted on, to be held against cached_tokens: both without what is pulled."""
    role: Role = Role.BOTH
    """What the worker does for this sequence: both, or its half of a handoff."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """KV of one sequence that was brought to a worker, from its first plan to its final report."""

    choice: int
    begun_s: float
    ended_s: float
    source: WorkerId
    """The target itself: it came out of its own lower tiers."""
    target: WorkerId
    num_units: int
    """Of 16 tokens, that came."""
    num_bytes: int
    transport: str
    """As in PullReport: shm | grpc | nixl | host | disk | redis."""
    failure: str | None = None
    """Why not all came; the rest was prefilled."""
    is_handoff: bool = False
    """From the worker that prefilled the sequence to the one that decodes it."""


@dataclass(slots=True)
class Timeline:
    """What happened to one request, on the engine's clock: the scheduler's spans are drawn from it."""

    arrived_s: float
    admissions: list[Admission] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class UpdateIndex:
    """Tell the prefix index what one worker's tier holds now, and no longer."""

    worker_id: WorkerId
    epoch: Epoch
    tier: Tier
    stored: list[UnitHash]
    dropped: list[UnitHash]
    fresh: bool = False
    """The first of a session: whatever the index had of this worker is void."""


Command: TypeAlias = DispatchPlan | PublishReply | FinishRequest | UpdateIndex
