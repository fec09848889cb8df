"""What must hold of an engine's books after every event, found by looking at all of them."""

from __future__ import annotations

from collections import Counter

from scheduler.engine import Engine


def every_page_in_use_is_held_by_somebody(engine: Engine) -> None:
    """Sequences here, sequences on their way here, page copies not reported, pulls from here; and what retires is being
    written by a pull that nobody waits for."""
    pulls = list(engine._placing._transfers)
    for worker in engine._workers.values():
        held = Counter(page for seq in worker.running.values() for page in seq.pages)
        held.update(page for seq in worker.incoming.values() if seq.handoff for page in seq.handoff.pages)
        held.update(page for flight in worker.in_flight for page in flight.pinned)
        held.update(worker.pending_pins)
        held.update(page for pull in pulls if pull.source is worker for page in pull.pinned)
        assert held == Counter({page: n for page, n in enumerate(worker.pool._references) if n})
        written = {page for pull in pulls if pull.target is worker and pull.seq is None for page in pull.pages}
        assert written == worker.pool._retiring
        assert worker.num_pulls == sum(1 for pull in pulls if pull.target is worker)
        assert all(seq.handoff is not None for seq in worker.incoming.values())


def whoever_has_something_to_say_says_it(engine: Engine) -> None:
    """Nothing is left for the next event, which may never come."""
    for worker in engine._workers.values():
        assert not worker.has_unsent
        stalled_for_nothing = worker.num_stalled() and worker.pool.num_available and not worker.in_flight
        assert not stalled_for_nothing, "a decode waits for a page that is there"


def what_is_kept_up_to_date_is_what_a_scan_would_find(engine: Engine) -> None:
    for worker in engine._workers.values():
        running = worker.running.values()
        assert worker.pulling.keys() == {s.seq_id for s in running if s.pull is not None}
        assert worker.prefilling.keys() == {s.seq_id for s in running if s.is_prefilling and s.pull is None}
        assert worker.parked.keys() == {s.seq_id for s in running if not s.is_prefilling and s.hands_off}
        prefilled = [s for s in running if not s.is_prefilling and not s.hands_off]
        assert worker.decoding.keys() == {s.seq_id for s in prefilled if s.prefill_end < s.max_slots}
        assert worker.queued_prefill_tokens == sum(s.prefill_end - s.num_dispatched for s in running)
        assert all(s.granted_slots == len(s.pages) * worker.page_size for s in running)
        growing = [s for s in worker.decoding.values() if s.granted_slots < s.max_slots]
        left = {s.seq_id: s.granted_slots - s.next_position for s in growing}
        assert worker.renewable.keys() == {s for s in left if left[s] < worker.slots_ahead}
        assert worker.urgent.keys() == {s for s in left if left[s] <= worker.half_lease}
    assert engine._queue.waiting_tokens == sum(len(s.tokens) for s in engine._queue)
