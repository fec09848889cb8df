"""Carries pulls out: each in a thread, a bounded number at once; a watch renews their leases and ends the silent ones.

begin ─▸ queued ─▸ a thread: offer, then layer by layer ─▸ over          exactly one report with `done`
            ╰────────── cancel, or silence ───────────────▸ over
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from gpu_worker.transfer.carriers import Carrier, RemoteCarrier, TierCarrier
from gpu_worker.transfer.port import KvPages, LowerTiers, RunningPull, UnitPlace
from gpu_worker.transfer.pull import RENEWALS_PER_LEASE, Pull, PullOver
from wire.errors import MeshError, TransferFailed
from wire.ids import WorkerId
from wire.plan import KvPull, PullReport

log = logging.getLogger("gpu_worker.transfer.puller")

MAX_RUNNING = 4
"""Pulls at once; more wait in order, their leases renewed."""
IDLE_WATCH_S = 5.0
"""How often the watch looks for neighbours that died while nothing is pulled."""


class TransferPuller:
    """`with TransferPuller(…) as puller`: implements gpu_worker.transfer.port.Puller."""

    def __init__(
        self, kv: KvPages, remote: RemoteCarrier, *, worker_id: WorkerId, tiers: LowerTiers | None = None
    ) -> None:
        """worker_id: this worker's; pulls whose source bears it come from `tiers`."""
        self._kv = kv
        self._remote = remote
        self._worker_id = worker_id
        self._local = None if tiers is None else TierCarrier(tiers, kv)
        self._threads = ThreadPoolExecutor(MAX_RUNNING, thread_name_prefix="kv-pull")
        self._pulls: list[Pull] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._watch_wakes_s = math.inf
        self._watch = threading.Thread(target=self._watch_pulls, name="kv-pull-watch", daemon=True)

    def __enter__(self) -> TransferPuller:
        self._watch.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
            pulls = list(self._pulls)
        for pull in pulls:
            pull.end("the worker is stopping")
        self._watch.join()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._remote.close()

    def begin(self, pull: KvPull, places: Sequence[UnitPlace], report: Callable[[PullReport], None]) -> RunningPull:
        """Bring pull.unit_hashes[i] to places[i]. Returns at once."""
        running = Pull(pull, places, self._kv, report, time.monotonic)
        with self._changed:
            self._pulls.append(running)
            if time.monotonic() + running.lease_s / RENEWALS_PER_LEASE < self._watch_wakes_s:
                self._changed.notify()
        self._threads.submit(self._run, running)
        return running

    def _run(self, pull: Pull) -> None:
        failure: str | None = None
        try:
            if not pull.is_ending:
                pull.started()
                self._carrier(pull).carry(pull)
        except PullOver:
            return
        except MeshError as error:
            failure = error.message
        except Exception as error:  # whatever a source or a tier gave: the pull fails, and the worker goes on
            log.exception("pull failed", extra={"pull": pull.request.pull_id})
            failure = f"{type(error).__name__}: {error}"
        finally:
            pull.end(failure)

    def _carrier(self, pull: Pull) -> Carrier:
        if pull.request.source_worker_id != self._worker_id:
            return self._remote
        if self._local is None:
            raise TransferFailed("this worker has no lower tiers")
        return self._local

    def _watch_pulls(self) -> None:
        while True:
            with self._changed:
                self._pulls = [pull for pull in self._pulls if not pull.is_over]
                wait_s = min((p.lease_s / RENEWALS_PER_LEASE for p in self._pulls), default=IDLE_WATCH_S)
                self._watch_wakes_s = time.monotonic() + wait_s
                self._changed.wait(wait_s)
                if self._stopping:
                    return
                pulls = list(self._pulls)
            now = time.monotonic()
            for pull in pulls:
                if pull.is_running and now - pull.heard_s > pull.lease_s:
                    pull.end(f"the source was silent for lease_ms = {pull.request.lease_ms}")
                else:
                    pull.renew(now)
            self._remote.drop_dead()
