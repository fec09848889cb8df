"""Nobody waits for ever, whatever keeps arriving; and service is shared among those who wait."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.events import Request
from scheduler.policy.fair_queue import OLDEST_EVERY, FairQueue, charge
from scheduler.sequence import LiveRequest, SeqState, Sequence
from wire.ids import GatewayId, RequestId, SeqId, UnitHash
from wire.sampling import SamplingParams


class Crowd:
    """Makes sequences, and admits and ends them like the engine does."""

    def __init__(self) -> None:
        self.queue = FairQueue()
        self.made = 0

    def arrive(self, tenant: str, priority: int = 0) -> Sequence:
        self.made += 1
        spec = Request(
            RequestId(str(self.made)),
            GatewayId("g"),
            [1],
            SamplingParams(1),
            UnitHash(b""),
            tenant=tenant,
            priority=priority,
        )
        seq = Sequence(SeqId(self.made), LiveRequest(spec, self.made), 0, [1], 1)
        self.queue.push(seq)
        return seq

    def admit(self, tokens: float, *, ends: bool = True) -> Sequence:
        seq = self.queue.peek()
        assert seq is not None
        self.queue.pop(seq)
        seq.state = SeqState.RUNNING
        charge(seq, tokens)
        if ends:
            seq.state = SeqState.FINISHED
            self.queue.leave(seq)
        return seq

    def requeue(self, seq: Sequence) -> None:
        seq.state, seq.requeued = SeqState.WAITING, True
        self.queue.push(seq)
        self.queue.leave(seq)


@settings(max_examples=60, deadline=None)
@given(
    before=st.integers(0, 10),
    charged=st.floats(0, 1e6),
    arrivals=st.lists(
        st.tuples(st.integers(0, 500), st.integers(-2, 5), st.floats(0.1, 100)), min_size=250, max_size=250
    ),
)
def test_nobody_starves_while_others_keep_arriving(
    before: int, charged: float, arrivals: list[tuple[int, int, float]]
) -> None:
    crowd = Crowd()
    crowd.arrive("victim")
    crowd.admit(charged, ends=False)  # the tenant has had a lot, and is still active
    for number in range(before):
        crowd.arrive(f"before{number}")
    victim = crowd.arrive("victim", priority=-3)
    for admitted, (tenant, priority, tokens) in enumerate(arrivals):
        crowd.arrive(f"new{tenant}", priority)  # as many come as go: the queue never empties
        crowd.arrive("victim", priority=9)
        if crowd.admit(tokens) is victim:
            assert admitted <= OLDEST_EVERY * (before + 1)
            return
    raise AssertionError("never admitted")


def test_two_backlogged_tenants_get_equal_service_whatever_their_requests_cost() -> None:
    crowd = Crowd()
    for _ in range(400):
        crowd.arrive("cheap")
        crowd.arrive("dear")
    got = {"cheap": 0.0, "dear": 0.0}
    for _ in range(300):
        waiting = crowd.queue.peek()
        assert waiting is not None
        cost = 10.0 if waiting.request.spec.tenant == "cheap" else 50.0
        got[crowd.admit(cost).request.spec.tenant] += cost
    assert 0.8 < got["cheap"] / got["dear"] < 1.25


def test_idling_earns_no_credit() -> None:
    crowd = Crowd()
    for _ in range(20):
        crowd.arrive("busy")
        crowd.admit(100.0, ends=False)
    for _ in range(10):
        crowd.arrive("busy")
        crowd.arrive("fresh")
    tenants = [crowd.admit(100.0).request.spec.tenant for _ in range(10)]
    assert 4 <= tenants.count("busy") <= 6


@given(moves=st.lists(st.sampled_from(["arrive", "admit", "requeue", "end", "drop"]), max_size=200), data=st.data())
@settings(max_examples=60, deadline=None)
def test_its_length_and_members_are_those_that_wait(moves: list[str], data: st.DataObject) -> None:
    crowd = Crowd()
    waiting: dict[SeqId, Sequence] = {}
    running: list[Sequence] = []
    for move in moves:
        if move == "arrive":
            seq = crowd.arrive(data.draw(st.sampled_from("abc")), data.draw(st.integers(-1, 1)))
            waiting[seq.seq_id] = seq
        elif move == "admit" and waiting:
            running.append(crowd.admit(1.0, ends=False))
            del waiting[running[-1].seq_id]
        elif move == "requeue" and running:
            seq = running.pop()
            crowd.requeue(seq)
            waiting[seq.seq_id] = seq
        elif move == "end" and running:
            seq = running.pop(0)
            seq.state = SeqState.FINISHED
            crowd.queue.leave(seq)
        elif move == "drop" and waiting:
            _, seq = waiting.popitem()
            seq.state = SeqState.FINISHED
            crowd.queue.discard(seq)
        assert len(crowd.queue) == len(waiting)
        assert {seq.seq_id for seq in crowd.queue} == waiting.keys()
        assert (crowd.queue.peek() is None) == (not waiting)
