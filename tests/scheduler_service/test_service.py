"""What the loop around the engine counts of events and finished requests."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from kvstore.memory_prefix_index import MemoryPrefixIndex
from kvstore.prefix_twin import PrefixTwin
from scheduler.commands import Admission, Command, FinishRequest, PublishReply, Timeline, Transfer
from scheduler.events import Event, PullReported, Tick
from scheduler.index_writer import IndexWriter
from scheduler.pending import PendingRequest
from scheduler.service import Service
from scheduler.stats import EngineStats
from tests.scheduler_service.parts import GATEWAY, Parts, request_entry
from wire.entries import ChoiceReply, ReplyItem, RequestStats, TerminalReply, TokensReply
from wire.ids import Epoch, PullId, RequestId, WorkerId
from wire.plan import PullReport, Role

W1, W2 = WorkerId("w1"), WorkerId("w2")


class ScriptedEngine:
    """Answers each event with the commands that the test wants."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def handle(self, event: Event, now: float) -> list[Command]:
        taken, self.commands = self.commands, []
        return taken

    def stats(self) -> EngineStats:
        raise AssertionError("not asked")


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def service(parts: Parts, engine: ScriptedEngine) -> Service:
    return Service(
        engine,
        parts.inbox,
        parts.clock,
        send_plan=lambda plan: None,
        workers_changed=lambda: None,
        publisher=parts.publisher,
        terminals=parts.terminals,
        index=IndexWriter(MemoryPrefixIndex(), PrefixTwin(), parts.lease),
        metrics=parts.metrics,
    )


def exported(parts: Parts, prefix: str) -> dict[str, float]:
    """Samples of the scheduler's metrics by name and labels, less histograms' buckets and creation times."""
    lines = generate_latest(parts.metrics.registry).decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line.startswith(f"phasemesh_scheduler_{prefix}"))
    return {
        name.removeprefix("phasemesh_scheduler_"): float(value)
        for name, _, value in samples
        if "_bucket" not in name and "_created" not in name
    }


def pulled(report: PullReport) -> PullReported:
    return PullReported(W1, Epoch(1), report)


async def test_a_pull_is_counted_once_by_its_last_report(parts: Parts, service: Service) -> None:
    one = PullId(1)
    service.turn([pulled(PullReport(one, done=False, transport="shm", num_bytes=999, elapsed_us=5))] * 3)
    assert exported(parts, "pulls_total") == {}
    service.turn(
        [
            pulled(PullReport(one, True, 8, None, "shm", num_bytes=4096, elapsed_us=2000)),
            pulled(PullReport(one, True, 3, "overran its lease", "grpc", num_bytes=1024, elapsed_us=500_000)),
            pulled(PullReport(one, True, 0, "no such worker")),
        ]
    )
    assert exported(parts, "pulls_total") == {
        'pulls_total{outcome="complete",transport="shm"}': 1,
        'pulls_total{outcome="partial",transport="grpc"}': 1,
        'pulls_total{outcome="failed",transport="none"}': 1,
    }
    assert exported(parts, "pull_seconds") == {
        'pull_seconds_count{transport="shm"}': 1,
        'pull_seconds_sum{transport="shm"}': 0.002,
        'pull_seconds_count{transport="grpc"}': 1,
        'pull_seconds_sum{transport="grpc"}': 0.5,
        'pull_seconds_count{transport="none"}': 1,
        'pull_seconds_sum{transport="none"}': 0,
    }
    assert exported(parts, "pulled_bytes")['pulled_bytes_total{transport="grpc"}'] == 1024


async def test_first_tokens_go_first_and_each_choice_in_order(
    parts: Parts, service: Service, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[ReplyItem] = []
    monkeypatch.setattr(parts.publisher, "publish", lambda gateway_id, item: published.append(item))
    old, new = RequestId("old"), RequestId("new")
    replies: list[TokensReply | ChoiceReply] = [
        TokensReply(old, 0, 7, [1]),
        ChoiceReply(old, 0, 8, "stop"),
        TokensReply(new, 1, 0, [2]),
        TokensReply(old, 1, 3, [3]),
        ChoiceReply(new, 1, 1, "length"),
        TokensReply(new, 0, 0, [4]),
    ]
    engine.commands = [PublishReply(GATEWAY, item) for item in replies]
    service.turn([Tick()])
    assert published == [replies[i] for i in (2, 5, 0, 1, 3, 4)]


async def test_predicted_hits_are_held_against_actual_ones_over_all_admissions(
    parts: Parts, service: Service, engine: ScriptedEngine
) -> None:
    parts.pending.add(PendingRequest(request_entry("r"), "interactive", b"1-0"))
    told = Timeline(
        arrived_s=1.0,
        admissions=[
            Admission(0, 1.0, 2.0, W1, 32, (), False, pulled_tokens=160, pull_source=W2, predicted_cached_tokens=64),
            Admission(0, 3.0, 4.0, W2, 16, (), True, predicted_cached_tokens=16),
            Admission(0, 5.0, 5.0, W1, 512, (), True, predicted_cached_tokens=512, role=Role.DECODE),
        ],
        transfers=[
            Transfer(0, 2.0, 2.5, W2, W1, 3, 1024, "shm", failure="cut off"),
            Transfer(0, 4.0, 5.0, W2, W1, 32, 4096, "shm", is_handoff=True),
        ],
    )
    terminal = TerminalReply(RequestId("r"), stats=RequestStats())
    engine.commands = [FinishRequest(GATEWAY, RequestId("r"), terminal, told)]
    service.turn([Tick()])
    assert exported(parts, "predicted_hit") == {
        'predicted_hit_tokens_total{source="local"}': 80,
        'predicted_hit_tokens_total{source="pull"}': 160,
    }
    assert exported(parts, "actual_hit") == {
        'actual_hit_tokens_total{source="local"}': 48,
        'actual_hit_tokens_total{source="pull"}': 48,
    }
