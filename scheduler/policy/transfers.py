"""KV on its way into a worker's pages: who waits for it, what is pinned for it, how long it will take. Pure.

    begin ─▸ under way ──PullReported(done)──▸ over           pages of the target: in_use, whoever waits
                │ cancelled, preempted: nobody waits           pages of the target: retiring until it is over
                └ silent for longer than its lease             the source's pages are let go; the worker sees to it that
                                                               nothing read after that is taken for KV

The worker reports every pull once more than it is renewed, whatever becomes of it: until then its target pages stay
out of use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from scheduler.commands import Transfer
from scheduler.sequence import Sequence
from scheduler.shared_units import SharedUnits
from scheduler.worker_view import WorkerView
from wire.ids import PageId, PullId, UnitHash, WorkerId
from wire.plan import KvPull, PullReport

MAX_PULLS: Final = 8
"""Under way into one worker; more would only share its bandwidth."""
DISTRUST_S: Final = 5.0
"""After a pull failed, nothing is pulled between the same two workers for so long: whatever it was may last."""


@dataclass(slots=True, eq=False)
class Pull:
    """One transfer: consecutive units of a sequence's chain go into `pages` of `target`."""

    pull_id: PullId
    seq: Sequence | None
    """Who waits for it; None: nobody any more."""
    target: WorkerView
    source: WorkerView | None
    """None once it is lost. The target itself: from its lower tiers."""
    source_id: WorkerId
    unit_hashes: list[UnitHash]
    pages: list[PageId]
    begun_s: float
    deadline_s: float
    """Renewed by each report."""
    guess_s: float
    """How long it would take by the first guess, before any was measured."""
    pinned: list[PageId] = field(default_factory=list)
    """Pages of the source, held for it."""
    is_overdue: bool = False

    @property
    def num_units(self) -> int:
        return len(self.unit_hashes)

    def transfer(self, seq: Sequence, report: PullReport, num_units: int, now: float) -> Transfer:
        """What the trace is told of it, once it is over."""
        return Transfer(
            choice=seq.choice,
            begun_s=self.begun_s,
            ended_s=now,
            source=self.source_id,
            target=self.target.worker_id,
            num_units=num_units,
            num_bytes=report.num_bytes,
            transport=report.transport,
            failure=report.failure,
            is_handoff=seq.handoff is not None,
        )


class Transfers:
    """Every pull that is not over. `lease_s`: a pull that is silent for so long has failed. `to_plan`: Placing's; takes
    the workers that something is to be said to, or that have pages back. `shared`: learns what is not there."""

    def __init__(self, lease_s: float, shared: SharedUnits, to_plan: dict[WorkerId, None]) -> None:
        self.lease_s = lease_s
        self._shared = shared
        self._to_plan = to_plan
        self.times = PullTimes()
        self._pulls: dict[PullId, Pull] = {}
        self._ids = count(1)
        self._distrusted: dict[tuple[WorkerId, WorkerId], float] = {}  # source, target → until

    def __iter__(self) -> Iterator[Pull]:
        return iter(self._pulls.values())

    def __len__(self) -> int:
        return len(self._pulls)

    def may_pull(self, source: WorkerView, target: WorkerView, now: float) -> bool:
        """Both can, the last try did not fail just now, and there is a place."""
        return target.num_pulls < MAX_PULLS and self.trusts(source, target, now)

    def trusts(self, source: WorkerView, target: WorkerView, now: float) -> bool:
        """Both can, and the last try did not fail just now."""
        if not (source.info.unit_bytes and target.info.unit_bytes):
            return False
        return self._distrusted.get((source.worker_id, target.worker_id), now) <= now

    def distrust(self, pull: Pull, now: float) -> None:
        """It failed."""
        if pull.source is not None:
            self._distrusted[pull.source.worker_id, pull.target.worker_id] = now + DISTRUST_S

    def begin(
        self,
        seq: Sequence,
        source: WorkerView,
        target: WorkerView,
        *,
        first_unit: int,
        end_unit: int,
        pages: list[PageId],
        now: float,
    ) -> Pull:
        """Pull units [first_unit, end_unit) of the sequence's chain into `pages`, which the caller holds; the next plan
        says so. first_unit is the first of a page. Pins what of it lies in the source's pages."""
        hashes = seq.unit_hashes()[:end_unit]
        pull = Pull(
            pull_id=PullId(next(self._ids)),
            seq=seq,
            target=target,
            source=source,
            source_id=source.worker_id,
            unit_hashes=hashes[first_unit:],
            pages=pages,
            begun_s=now,
            deadline_s=now + self.lease_s,
            guess_s=self.times.guess_s(source, target, end_unit - first_unit),
        )
        if source is not target:
            pull.pinned = _pages_holding(source, hashes, first_unit)
            for page in pull.pinned:
                source.pool.acquire(page)
        self._pulls[pull.pull_id] = pull
        target.num_pulls += 1
        self._to_plan[target.worker_id] = None
        target.pending_pulls.append(
            KvPull(
                pull_id=pull.pull_id,
                source_worker_id=source.worker_id,
                source_address=source.info.advertise_address,
                source_epoch=source.epoch,
                unit_hashes=pull.unit_hashes,
                target_pages=pages,
                lease_ms=int(self.lease_s * 1000),
            )
        )
        return pull

    def reported(self, target: WorkerView, report: PullReport, now: float) -> Pull | None:
        """Take a worker's word on a pull; returns the pull when it is over, whether somebody waits for it or not."""
        pull = self._pulls.get(report.pull_id)
        if pull is None or pull.target is not target:
            return None
        if not report.done:
            pull.deadline_s = now + self.lease_s
            return None
        del self._pulls[pull.pull_id]
        target.num_pulls -= 1
        self._to_plan[target.worker_id] = None
        self._unpin(pull)
        if pull.seq is None:
            for page in pull.pages:
                target.pool.retired(page)
        elif report.failure is None:
            self.times.observe(pull, now - pull.begun_s)
        elif not self._was_gone(pull, report.num_units):
            self.distrust(pull, now)
        return pull

    def _was_gone(self, pull: Pull, num_units: int) -> bool:
        """What failed is that Redis does not have, or no longer, what it was thought to have. Nobody counts on these
        any more, so there is nothing to try again, and no worker to distrust."""
        is_own = pull.source is pull.target
        return is_own and self._shared.missing(pull.target.info, pull.unit_hashes[num_units:])

    def abandon(self, pull: Pull) -> None:
        """Nobody waits any more. The pages are the worker's until it reports: `retiring`, once they are released
        with release_pages()."""
        pull.seq = None
        pull.target.pending_cancels.append(pull.pull_id)
        self._to_plan[pull.target.worker_id] = None

    def expire(self, now: float) -> list[Pull]:
        """Pulls that were silent for longer than their lease, each once: their sources' pages are no longer pinned."""
        # Workers come and go under ever new names: what is over is not kept.
        self._distrusted = {pair: until for pair, until in self._distrusted.items() if until > now}
        overdue = [pull for pull in self._pulls.values() if pull.deadline_s < now and not pull.is_overdue]
        for pull in overdue:
            pull.is_overdue = True
            self.distrust(pull, now)
            self._unpin(pull)
        return overdue

    def lose_worker(self, worker: WorkerView) -> list[Pull]:
        """Forget the pulls into a worker that is gone, and the pins on it; returns those pulls."""
        into = [pull for pull in self._pulls.values() if pull.target is worker]
        for pull in into:
            del self._pulls[pull.pull_id]
            self._unpin(pull)
        for pull in self._pulls.values():
            if pull.source is worker:
                pull.source, pull.pinned = None, []
        return into

    def _unpin(self, pull: Pull) -> None:
        if pull.source is not None and pull.pinned:
            pull.source.pool.release(pull.pinned)
            self._to_plan[pull.source.worker_id] = None  # a decode may wait for just these pages
        pull.pinned = []


def release_pages(worker: WorkerView, pages: list[PageId], pull: Pull | None) -> None:
    """Give up a sequence's pages, tail first; those a pull may still write into retire until it is over."""
    written = set(pull.pages) if pull is not None else set()
    for page in reversed(pages):
        if page in written:
            worker.pool.retire(page)
        else:
            worker.pool.release((page,))


def _pages_holding(source: WorkerView, hashes: list[UnitHash], first_unit: int) -> list[PageId]:
    match = source.pool.match(hashes)
    pages = match.full_pages[first_unit // source.pool.units_per_page :]
    return pages if match.partial_page is None else [*pages, match.partial_page]


class PullTimes:
    """How long a pull takes: a first guess by what it crosses, times what pulls of that kind took instead. The guesses
    are for good links: one that is too slow to be tried would never be put right.

    seconds = factor · (FIXED_S + bytes ÷ bandwidth)
    """

    FIXED_S = 0.005
    OWN_TIERS_BYTES_PER_S = 2e9
    SAME_HOST_BYTES_PER_S = 2e9
    OTHER_HOST_BYTES_PER_S = 1e9
    SMOOTHING = 0.2
    SURPRISE = 4.0
    """One pull counts as at most so many times slower or faster than was expected."""

    def __init__(self) -> None:
        self._factors: dict[float, float] = {}

    def guess_s(self, source: WorkerView, target: WorkerView, num_units: int) -> float:
        return self.FIXED_S + num_units * target.info.unit_bytes / _bandwidth(self, source, target)

    def predict_s(self, source: WorkerView, target: WorkerView, num_units: int) -> float:
        """Of a pull beside those that are under way into the target."""
        factor = self._factors.get(_bandwidth(self, source, target), 1.0)
        return factor * self.guess_s(source, target, num_units) * (1 + target.num_pulls)

    def observe(self, pull: Pull, elapsed_s: float) -> None:
        """Learn from a pull that succeeded."""
        if pull.source is None or pull.guess_s <= 0 or elapsed_s <= 0:
            return
        kind = _bandwidth(self, pull.source, pull.target)
        factor = self._factors.get(kind, 1.0)
        surprise = min(max(elapsed_s / pull.guess_s, factor / self.SURPRISE), factor * self.SURPRISE)
        self._factors[kind] = factor + self.SMOOTHING * (surprise - factor)


def _bandwidth(times: PullTimes, source: WorkerView, target: WorkerView) -> float:
    if source is target:
        return times.OWN_TIERS_BYTES_PER_S
    if source.info.host_id and source.info.host_id == target.info.host_id:
        return times.SAME_HOST_BYTES_PER_S
    return times.OTHER_HOST_BYTES_PER_S
