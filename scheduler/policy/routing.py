"""Which worker a waiting sequence goes to: what each would cost, in tokens prefilled meanwhile. Pure.

    cost = uncached tokens + time of a pull + queued prefill + KV pressure + active decodes + decodes disturbed

What lies in a worker's own pages is free; what another worker or a lower tier holds costs the time of pulling it, by
prediction, and is pulled only where that is less than prefilling it (docs/adr/0009). A hot prefix spreads by itself:
its worker loses to a colder one once its queue outweighs the pull.

Where some workers only prefill, a prompt has two ways: beside the decodes of the worker that will decode it, which that
disturbs, or on a prefill worker and from there by handoff (handoff.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Container
from dataclasses import dataclass, replace
from math import isfinite

from kvstore.prefix_twin import PrefixTwin
from scheduler.commands import RouteCandidate
from scheduler.policy.placement import Placement, PullOption, Room, find_room, fits_ever
from scheduler.policy.routed_prefixes import RoutedPrefixes
from scheduler.policy.step_time import StepWork
from scheduler.policy.tie_breaker import TieBreaker
from scheduler.policy.transfers import Transfers
from scheduler.sequence import Sequence
from scheduler.shared_units import SharedUnits
from scheduler.stats import PrefillRate
from scheduler.worker_view import WorkerView
from wire.config import BatchingConfig
from wire.ids import UNIT_TOKENS, UnitHash, WorkerId
from wire.plan import Tier

KV_PRESSURE_TOKENS = 256.0
"""What a full pool weighs, in prefill tokens."""
DECODE_TOKENS = 4.0
"""What one active decode weighs."""
UNMEASURED_TOKENS_PER_S = 1000.0
"""Prefill rate before any was measured."""


@dataclass(frozen=True, slots=True)
class Prefixes:
    """Leading units of a chain, by worker; who has none is left out."""

    chain: list[UnitHash]
    to_others: dict[WorkerId, int]
    """It holds them, in whatever tier."""
    to_itself: dict[WorkerId, int]
    """It holds them, or they lie in the cell's Redis, where it can read them. At least what it holds."""
    gaps: dict[str, list[int]]
    """By layout, the units that are not in Redis."""

    def __bool__(self) -> bool:
        return bool(self.to_itself)

    def between(self, source: WorkerView, target: WorkerView) -> int:
        """What a pull may bring."""
        return (self.to_itself if source is target else self.to_others).get(source.worker_id, 0)


NOTHING = Prefixes([], {}, {}, {})


class Router:
    """`routing_seed` decides ties between workers, and everything where PHASEMESH_ROUTING=random."""

    def __init__(
        self,
        config: BatchingConfig,
        twin: PrefixTwin,
        shared: SharedUnits,
        transfers: Transfers,
        rate: PrefillRate,
        *,
        routing_seed: int,
    ) -> None:
        self._config = config
        self._twin = twin
        self._shared = shared
        self._transfers = transfers
        self._times = transfers.times
        self._rate = rate
        self._break_tie = TieBreaker(routing_seed)
        self._now = 0.0
        self._pulls = config.routing == "precise" and config.kv_pull
        self._routed = RoutedPrefixes() if config.routing == "approximate" else None

    def placements(
        self, seq: Sequence, workers: Collection[WorkerView], closed: Container[WorkerId], now: float
    ) -> list[Placement]:
        """Every way the sequence could begin now, on workers that are not closed; empty when it has to wait."""
        self._now = now
        suited = [worker for worker in suited_workers(seq, workers) if worker.worker_id not in closed]
        rooms = [room for worker in suited if (room := find_room(seq, worker, self._config)) is not None]
        if not rooms:
            return []
        decoding = decoders(workers)
        is_split = len(decoding) < len(workers)
        decoder_rooms = [room for room in rooms if room.worker in decoding]
        prefixes = self._lookup(seq, workers)
        options = [self._placement(seq, room, prefixes, workers, beside_decodes=is_split) for room in decoder_rooms]
        if is_split and not seq.local_only:
            for room in rooms:
                targets = [] if room.worker in decoding else self._targets(room.worker, decoder_rooms)
                if targets:
                    placement = self._placement(seq, room, prefixes, workers, beside_decodes=False)
                    options.append(self._handing_off(placement, targets))
        return options

    def _targets(self, source: WorkerView, rooms: list[Room]) -> list[WorkerView]:
        return [room.worker for room in rooms if self._transfers.may_pull(source, room.worker, self._now)]

    def handoff_targets(self, seq: Sequence, workers: Collection[WorkerView], now: float) -> list[WorkerView]:
        """Workers that may decode a sequence which another one prefills, once they have room; none, when it had better
        stay: its own decodes by now, or nobody else can get its KV."""
        source = seq.worker
        assert source is not None
        if source.takes_decodes:
            return []
        return [
            worker
            for worker in suited_workers(seq, workers)
            if worker.takes_decodes and self._transfers.trusts(source, worker, now) and fits_ever(seq, worker)
        ]

    def handoff_room(self, seq: Sequence, targets: list[WorkerView], now: float) -> Room | None:
        """The best of those that have room now."""
        assert seq.worker is not None
        rooms = [
            room
            for worker in targets
            if self._transfers.may_pull(seq.worker, worker, now)
            and (room := find_room(seq, worker, self._config, more_tokens=1)) is not None
        ]
        return min(rooms, key=lambda room: _load(room.worker) + _pressure(room.worker) - room.num_shared, default=None)

    def choose(self, seq: Sequence, placements: list[Placement]) -> Placement:
        """By PHASEMESH_ROUTING; a seeded stream breaks ties."""
        match self._config.routing:
            case "random":
                return placements[self._break_tie(len(placements))]
            case "least_loaded":
                costs = [p.candidate.cost - p.candidate.uncached_tokens for p in placements]
            case "approximate":
                assert self._routed is not None
                uncached = self._routed.uncached_tokens(seq)
                costs = [
                    p.candidate.cost - p.candidate.uncached_tokens + uncached.get(p.worker.worker_id, len(seq.tokens))
                    for p in placements
                ]
            case _:
                costs = [p.candidate.cost for p in placements]
        lowest = min(costs)
        best = [p for p, cost in zip(placements, costs, strict=True) if cost == lowest]
        chosen = best[self._break_tie(len(best))] if len(best) > 1 else best[0]
        if self._routed is not None:
            self._routed.add(seq, chosen.worker)
        return chosen

    def forget(self, worker: WorkerView) -> None:
        """It is gone, and its KV with it."""
        if self._routed is not None:
            self._routed.drop_worker(worker.worker_id)

    def _lookup(self, seq: Sequence, workers: Collection[WorkerView]) -> Prefixes:
        if not self._pulls or seq.local_only:
            return NOTHING
        if len(workers) == 1 and not self._shared and not any(worker.has_lower_tiers for worker in workers):
            return NOTHING
        chain = seq.unit_hashes()[: (len(seq.tokens) - 1) // UNIT_TOKENS]
        held = {worker_id: prefix.any_tier for worker_id, prefix in self._twin.lookup(chain).items()}
        gaps = self._gaps(chain, workers)
        return Prefixes(chain, held, self._with_shared(chain, held, gaps, workers) if gaps else held, gaps)

    def _gaps(self, chain: list[UnitHash], workers: Collection[WorkerView]) -> dict[str, list[int]]:
        """By layout, the units that are not in Redis: many workers have the same one."""
        gaps: dict[str, list[int]] = {}
        for worker in workers if self._shared else ():
            tier = worker.info.shared_tier
            if tier is not None and tier.layout not in gaps:
                shared = self._shared.readable_by(worker.info)
                gaps[tier.layout] = [n for n, unit_hash in enumerate(chain) if unit_hash not in shared]
        return gaps

    def _with_shared(
        self,
        chain: list[UnitHash],
        held: dict[WorkerId, int],
        gaps: dict[str, list[int]],
        workers: Collection[WorkerView],
    ) -> dict[WorkerId, int]:
        """How far each gets by itself: of a chain the tail goes to Redis first, so the head may lie in one tier and the
        rest in the other."""
        reach = dict(held)
        for worker in workers:
            if worker.info.shared_tier is None:
                continue
            missing = gaps[worker.info.shared_tier.layout]
            before = held.get(worker.worker_id, 0)
            behind = missing[bisect_left(missing, before) :]
            end = next((gap for gap in behind if not self._is_below(worker, chain[gap])), len(chain))
            if end > before:
                reach[worker.worker_id] = end
        return reach

    def _is_below(self, worker: WorkerView, unit_hash: UnitHash) -> bool:
        """The worker can read the unit from below its pages."""
        if unit_hash in self._shared.readable_by(worker.info):
            return True
        tiers = self._twin.tiers(worker.worker_id, unit_hash)
        return bool(tiers) and tiers[-1] is not Tier.DEVICE

    def _placement(
        self, seq: Sequence, room: Room, prefixes: Prefixes, workers: Collection[WorkerView], *, beside_decodes: bool
    ) -> Placement:
        worker, num_tokens = room.worker, len(seq.tokens)
        best = self._best_pull(room, prefixes, workers) if prefixes else None
        pull = best if best is not None and best.is_worth_it else None
        num_cached = room.num_cached if pull is None else pull.end_unit * UNIT_TOKENS
        uncached = num_tokens - num_cached
        disturbs = beside_decodes and uncached > self._undisturbed_tokens(worker)
        candidate = RouteCandidate(
            worker_id=worker.worker_id,
            uncached_tokens=float(uncached),
            queued_prefill_tokens=float(worker.queued_prefill_tokens),
            kv_pressure=_pressure(worker),
            active_decodes=_load(worker),
            # Without a decode now, there will be one before so long a prompt is through.
            disturbed_decodes=float(uncached * max(1, len(worker.decoding))) if disturbs else 0.0,
        )
        if best is not None:
            saved = best.end_unit * UNIT_TOKENS - room.num_cached
            candidate = replace(
                candidate,
                pulled_tokens=float(saved) if pull else 0.0,
                pull_cost_tokens=best.pull_s * saved / best.prefill_s if pull else 0.0,
                pull_source=best.source.worker_id if pull else "",
                predicted_prefill_s=best.prefill_s,
                predicted_pull_s=best.pull_s,
            )
        return Placement(room, pull, False, candidate)

    def _handing_off(self, placement: Placement, targets: list[WorkerView]) -> Placement:
        """Prefilled there and decoded elsewhere: what is not pulled while the prompt is prefilled comes after it."""
        worker = placement.worker
        last_units = self._config.step_token_budget // UNIT_TOKENS
        tail_s = min(self._times.predict_s(worker, target, last_units) for target in targets)
        cost = placement.candidate.pull_cost_tokens + tail_s * self._tokens_per_s(worker)
        return replace(placement, hands_off=True, candidate=replace(placement.candidate, pull_cost_tokens=cost))

    def _best_pull(self, room: Room, prefixes: Prefixes, workers: Collection[WorkerView]) -> PullOption | None:
        """What saves the most time, or costs the least where none saves any."""
        target = room.worker
        first_unit = len(room.shared_pages) * target.pool.units_per_page
        best: PullOption | None = None
        for source in workers:
            end_unit = prefixes.between(source, target)
            if source is target and end_unit * UNIT_TOKENS > room.num_cached:
                end_unit = self._end_below(target, prefixes, first_unit, end_unit)
            if end_unit * UNIT_TOKENS <= room.num_cached:
                continue
            if not self._transfers.may_pull(source, target, self._now):
                continue
            option = PullOption(
                source,
                first_unit,
                end_unit,
                self._times.predict_s(source, target, end_unit - first_unit),
                self._prefill_s(target, room.num_cached, end_unit * UNIT_TOKENS),
            )
            if best is None or option.prefill_s - option.pull_s > best.prefill_s - best.pull_s:
                best = option
        return best

    def _end_below(self, worker: WorkerView, prefixes: Prefixes, first_unit: int, end_unit: int) -> int:
        """A worker does not read its own pages: of [first_unit, end_unit) it pulls from itself what comes before the
        first unit that lies in nothing else."""
        tier = worker.info.shared_tier
        everything = range(end_unit)
        gaps = everything if tier is None else prefixes.gaps.get(tier.layout, everything)
        asked = gaps[bisect_left(gaps, first_unit) : bisect_left(gaps, end_unit)]
        return next((unit for unit in asked if not self._is_below(worker, prefixes.chain[unit])), end_unit)

    def _prefill_s(self, worker: WorkerView, start_pos: int, end: int) -> float:
        us = worker.step_time.prefill_us(start_pos, end, self._config.step_token_budget)
        return us * 1e-6 if us else (end - start_pos) / self._tokens_per_s(worker)

    def _tokens_per_s(self, worker: WorkerView) -> float:
        budget = self._config.step_token_budget
        us = worker.step_time.prefill_us(0, budget, budget)
        return budget / us * 1e6 if us else (self._rate.tokens_per_s or UNMEASURED_TOKENS_PER_S)

    def _undisturbed_tokens(self, worker: WorkerView) -> int:
        """What one step takes beside the worker's decodes within the ITL target: prefilling so much disturbs nobody."""
        left = self._config.step_token_budget - len(worker.decoding)
        if not isfinite(self._config.itl_target_ms):
            return left
        work = StepWork(len(worker.decoding), decode_context=worker.step_time.decode_context)
        return min(left, worker.step_time.chunk_that_fits(work, 0, 1000.0 * self._config.itl_target_ms))


def decoders(workers: Collection[WorkerView]) -> Collection[WorkerView]:
    """Those that decode; all, where none does: better than to serve nobody."""
    return [worker for worker in workers if worker.takes_decodes] or workers


def suited_workers(seq: Sequence, workers: Collection[WorkerView]) -> Collection[WorkerView]:
    """The pool of workers for prompts of this length; all, where none of it could ever hold and decode it."""
    suited = [worker for worker in workers if worker.suits(seq.num_prompt) and fits_ever(seq, worker)]
    if any(worker.takes_decodes for worker in suited):
        return suited
    return workers if any(worker.takes_decodes for worker in workers) else suited or workers


def _pressure(worker: WorkerView) -> float:
    return KV_PRESSURE_TOKENS * worker.pool.counts().in_use / worker.pool.num_pages


def _load(worker: WorkerView) -> float:
    return DECODE_TOKENS * (len(worker.decoding) + len(worker.incoming))
