"""What can happen to the engine. Frozen records; I/O results come in as events, time is passed beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from wire.ids import Epoch, GatewayId, RequestId, UnitHash, WorkerId
from wire.plan import PageUnits, PullReport, Role, StepReport, Tier, TierUnits, WorkerInfo
from wire.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the engine sees it. Times are seconds on the engine's clock (the `now` of handle)."""

    request_id: RequestId
    gateway_id: GatewayId
    prompt: list[int]
    sampling: SamplingParams
    root_hash: UnitHash
    """Parent of the prompt's first unit: cache namespace and salt."""
    num_choices: int = 1
    tenant: str = "default"
    priority: int = 0
    deadline_s: float | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """What an earlier scheduler had already published of one choice."""

    choice: int
    output: list[int]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request
    progress: tuple[ChoiceProgress, ...] = ()
    """Only after a scheduler's death: continue from here."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """May name a request that is unknown, finished, or not yet arrived; all are harmless."""

    request_id: RequestId
    reason: str
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A worker's session is open. A known worker with a new epoch replaces the old one."""

    info: WorkerInfo
    residents: list[PageUnits]
    tiers: list[TierUnits] = field(default_factory=list)
    """What it holds below its pages."""


@dataclass(frozen=True, slots=True)
class WorkerDown:
    """A worker's session ended. An epoch that is not the current one is ignored."""

    worker_id: WorkerId
    epoch: Epoch
    reason: str


@dataclass(frozen=True, slots=True)
class StepReported:
    worker_id: WorkerId
    epoch: Epoch
    report: StepReport


@dataclass(frozen=True, slots=True)
class PullReported:
    """A transfer into a worker's pages goes on, or is over."""

    worker_id: WorkerId
    epoch: Epoch
    report: PullReport


@dataclass(frozen=True, slots=True)
class TierChanged:
    """Units entered or left one of a worker's tiers below its pages."""

    worker_id: WorkerId
    epoch: Epoch
    units: TierUnits


@dataclass(frozen=True, slots=True)
class ResidencyAudited:
    """What a worker itself says it holds, all of it, where the twin said otherwise in two audits in a row."""

    worker_id: WorkerId
    epoch: Epoch
    pages: list[PageUnits]
    tiers: list[TierUnits]
    """One of each tier below the pages that holds anything; `stored` is all it holds."""
    differing: dict[Tier, frozenset[UnitHash]]
    """The units in question, by tier: the worker holds them and the twin did not say so, or the other way round. Of all
    others nothing is to be concluded: changes of them are on their way."""


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """An operator gave a worker another role: what runs there runs on, what comes follows the new one."""

    worker_id: WorkerId
    role: Role


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; send at least every 250 ms."""


@dataclass(frozen=True, slots=True)
class FenceLost:
    """Another scheduler is active: forget everything, command nothing more."""


Event: TypeAlias = (
    RequestArrived
    | CancelRequested
    | WorkerUp
    | WorkerDown
    | StepReported
    | PullReported
    | TierChanged
    | ResidencyAudited
    | RoleChanged
    | Tick
    | FenceLost
)
