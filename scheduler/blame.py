"""Whose fault a lost worker may be: requests that were present when too many steps failed or workers died end. Pure.

A request that had its next token since is above suspicion again; so is one whose worker comes back in the same epoch,
for then only the link had broken.
"""

from __future__ import annotations

from collections.abc import Container

from scheduler.sequence import MAX_FAULTS, LiveRequest
from scheduler.worker_view import WorkerView
from wire.ids import Epoch, RequestId, WorkerId

MAX_BLAMED = 64
"""Lost workers whose requests are remembered; more, and those lost first are taken to be gone for good."""


class Blame:
    """`live`: the ids of requests that have not ended."""

    def __init__(self, live: Container[RequestId]) -> None:
        self._live = live
        self._by_worker: dict[WorkerId, tuple[Epoch, list[LiveRequest]]] = {}
        """In which epoch it was lost last, and who was blamed for it."""
        self.has_faults = False
        """Some request may have some."""

    def worker_lost(self, worker: WorkerView, present: list[LiveRequest]) -> list[LiveRequest]:
        """Somebody present may be the cause: a suspect if there was one, else anybody. Returns who is to end for it."""
        blamed = [request for request in present if request.is_suspect] or present
        for request in blamed:
            request.faults += 1
            self.has_faults = True
        self._by_worker.pop(worker.worker_id, None)
        if blamed:
            self._by_worker[worker.worker_id] = worker.epoch, list(blamed)
        if len(self._by_worker) > MAX_BLAMED:
            del self._by_worker[next(iter(self._by_worker))]
        return [request for request in blamed if request.faults >= MAX_FAULTS]

    def worker_back(self, worker: WorkerView) -> None:
        """In the same epoch: it had not died, only its link had, and that is nobody's fault."""
        epoch, blamed = self._by_worker.pop(worker.worker_id, (None, []))
        if epoch == worker.epoch:
            for request in blamed:
                request.faults = max(0, request.faults - 1)

    def forget_ended(self) -> None:
        """Nothing is kept of requests that ended; call it now and then."""
        for worker_id, (_, blamed) in list(self._by_worker.items()):
            blamed[:] = [request for request in blamed if request.spec.request_id in self._live]
            if not blamed:
                del self._by_worker[worker_id]
