"""The pulls of the session that is open: begun in plan order, each ended in exactly one report, none outliving it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from gpu_worker.residency import Residency
from gpu_worker.transfer.port import Puller, RunningPull, unit_places
from wire.ids import UNIT_TOKENS, PullId
from wire.plan import KvPull, PullReport


class SessionPulls:
    """Called by the compute thread alone; reports come from the puller's threads."""

    def __init__(self, puller: Puller | None, residency: Residency, *, num_pages: int, page_size: int) -> None:
        """puller None: this worker takes no KV, and every pull fails."""
        self._puller = puller
        self._residency = residency
        self._num_pages = num_pages
        self._page_size = page_size
        self._running: dict[PullId, RunningPull] = {}

    def begin(self, pull: KvPull, deliver: Callable[[PullReport], None]) -> None:
        """Make the target pages the pull's own, and start it. `deliver` gets its reports, in any thread."""
        self._running = {pull_id: running for pull_id, running in self._running.items() if not running.is_over}
        obstacle = self._obstacle(pull)
        if self._puller is None or obstacle is not None:
            deliver(PullReport(pull.pull_id, done=True, failure=obstacle or "this worker takes no KV"))
            return
        generations = self._residency.void(pull.target_pages)
        places = unit_places(pull.target_pages, len(pull.unit_hashes), self._page_size, UNIT_TOKENS)
        report = partial(self._report, pull, generations, deliver)
        self._running[pull.pull_id] = self._puller.begin(pull, places, report)

    def cancel(self, pull_ids: Iterable[PullId]) -> None:
        """Nobody wants these any more; they report all the same. Unknown ones are over."""
        for pull_id in pull_ids:
            if pull_id in self._running:
                self._running[pull_id].cancel()

    def end_all(self) -> None:
        """Their session is over: when this returns, none of them writes to a page any more."""
        for running in self._running.values():
            running.cancel()
        for running in self._running.values():
            running.wait()
        self._running.clear()

    def _obstacle(self, pull: KvPull) -> str | None:
        capacity = len(pull.target_pages) * (self._page_size // UNIT_TOKENS)
        if len(pull.unit_hashes) > capacity:
            return f"unit_hashes: {len(pull.unit_hashes)}, the target pages hold {capacity}"
        if any(page >= self._num_pages for page in pull.target_pages):
            return f"target_pages: page {max(pull.target_pages)} of a pool of {self._num_pages}"
        if len(set(pull.target_pages)) != len(pull.target_pages):
            return "target_pages: one of them twice"
        return None

    def _report(
        self, pull: KvPull, generations: list[int], deliver: Callable[[PullReport], None], report: PullReport
    ) -> None:
        if report.done:  # resident before anybody hears of it
            self._residency.pulled(pull.target_pages, generations, pull.unit_hashes[: report.num_units])
        deliver(report)
