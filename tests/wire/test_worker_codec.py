"""Plans and reports come out of their protobuf bytes as they went in."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wire import strategies
from wire import plan, worker_codec, worker_pb2
from wire.errors import EntryMalformed
from wire.ids import Fence, PlanId, SeqId
from wire.plan import PullReport, Residents, StepPlan, StepReport, WorkerInfo
from wire.sampling import SamplingParams


@given(sent=strategies.step_plans)
def test_a_plan_survives_the_trip(sent: StepPlan) -> None:
    data = worker_codec.encode_plan(sent).SerializeToString()
    assert worker_codec.decode_plan(worker_pb2.StepPlan.FromString(data)) == sent


@given(sent=strategies.step_reports)
def test_a_report_survives_the_trip(sent: StepReport) -> None:
    data = worker_codec.encode_report(sent).SerializeToString()
    assert worker_codec.decode_report(worker_pb2.StepReport.FromString(data)) == sent


@given(sent=strategies.sampling)
def test_sampling_survives_the_trip(sent: SamplingParams) -> None:
    data = worker_codec.encode_sampling(sent).SerializeToString()
    assert worker_codec.decode_sampling(worker_pb2.Sampling.FromString(data)) == sent


@given(sent=strategies.worker_infos)
def test_a_hello_survives_the_trip(sent: WorkerInfo) -> None:
    data = worker_codec.encode_hello(sent).SerializeToString()
    assert worker_codec.decode_hello(worker_pb2.Hello.FromString(data)) == sent


@given(sent=strategies.residents, last=st.booleans())
def test_residents_survive_the_trip(sent: Residents, last: bool) -> None:
    encoded = worker_codec.encode_residents(sent.pages, sent.tiers, last=last)
    message = worker_pb2.Residents.FromString(encoded.SerializeToString())
    assert worker_codec.decode_residents(message) == sent
    assert message.last == last


@given(sent=strategies.pull_reports)
def test_a_pull_report_survives_the_trip(sent: PullReport) -> None:
    data = worker_codec.encode_pull_report(sent).SerializeToString()
    assert worker_codec.decode_pull_report(worker_pb2.PullReport.FromString(data)) == sent


def test_an_unknown_role_or_tier_is_refused() -> None:
    with pytest.raises(EntryMalformed, match="role 'boss', not one of prefill, decode, both"):
        worker_codec.decode_hello(worker_pb2.Hello(role="boss"))
    with pytest.raises(EntryMalformed, match="layout"):
        worker_codec.decode_hello(worker_pb2.Hello(role="both", shared_tier=worker_pb2.SharedTier(max_units=1)))
    with pytest.raises(EntryMalformed, match="tier 'device', not one of host, disk, redis"):
        worker_codec.decode_tier_units(worker_pb2.TierUnits(tier="device"))


def test_no_logprobs_and_zero_logprobs_are_told_apart() -> None:
    none, zero = SamplingParams(max_tokens=1), SamplingParams(max_tokens=1, logprobs=0)
    assert worker_codec.decode_sampling(worker_codec.encode_sampling(none)).logprobs is None
    assert worker_codec.decode_sampling(worker_codec.encode_sampling(zero)).logprobs == 0


def test_an_empty_grant_is_not_an_absent_one() -> None:
    empty = plan.Decode(SeqId(1), 0, plan.PageGrant(first_index=0, page_ids=[], granted_slots=0))
    sent = StepPlan(PlanId(1), Fence(1), decodes=[empty])
    assert worker_codec.decode_plan(worker_codec.encode_plan(sent)).decodes == [empty]


def test_an_unknown_finish_reason_is_refused() -> None:
    tired = worker_pb2.Progress(seq_id=1, finish_reason="tired")
    report = worker_pb2.StepReport(plan_id=1, progress=[tired], progress_at=[0])
    with pytest.raises(EntryMalformed, match="tired"):
        worker_codec.decode_report(report)


@pytest.mark.parametrize("column", ["seq_ids", "incarnations", "num_computed", "tokens", "progress_at"])
def test_columns_of_unequal_length_are_refused(column: str) -> None:
    progress = [plan.Progress(SeqId(1), 0, 9, [5]), plan.Progress(SeqId(2), 0, 9, [])]
    message = worker_codec.encode_report(StepReport(PlanId(1), 0, False, progress))
    del getattr(message if column == "progress_at" else message.plain, column)[:]
    with pytest.raises(EntryMalformed, match="unequal length"):
        worker_codec.decode_report(message)


@pytest.mark.parametrize("column", ["seq_ids", "incarnations", "decodes_at"])
def test_columns_of_decodes_of_unequal_length_are_refused(column: str) -> None:
    granted = plan.Decode(SeqId(2), 0, plan.PageGrant(0, [], 5))
    message = worker_codec.encode_plan(StepPlan(PlanId(1), Fence(1), decodes=[plan.Decode(SeqId(1), 0), granted]))
    del getattr(message if column == "decodes_at" else message.plain_decodes, column)[:]
    with pytest.raises(EntryMalformed, match="unequal length"):
        worker_codec.decode_plan(message)


def test_one_token_and_nothing_else_needs_no_message_of_its_own() -> None:
    progress = [plan.Progress(SeqId(i), 0, 9, [i]) for i in range(5)]
    progress.insert(2, plan.Progress(SeqId(7), 0, 9, [1], error="why"))
    message = worker_codec.encode_report(StepReport(PlanId(1), 0, False, progress))
    assert (len(message.progress), list(message.progress_at)) == (1, [2])
    assert worker_codec.decode_report(message).progress == progress


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (plan.StepPlan, worker_pb2.StepPlan),
        (plan.PrefillChunk, worker_pb2.PrefillChunk),
        (plan.SequenceStart, worker_pb2.SequenceStart),
        (plan.Decode, worker_pb2.Decode),
        (plan.Child, worker_pb2.Child),
        (plan.PageGrant, worker_pb2.PageGrant),
        (plan.PageCopy, worker_pb2.PageCopy),
        (plan.KvPull, worker_pb2.KvPull),
        (plan.Release, worker_pb2.Release),
        (plan.StepReport, worker_pb2.StepReport),
        (plan.Progress, worker_pb2.Progress),
        (plan.StepTiming, worker_pb2.StepTiming),
        (plan.WorkerInfo, worker_pb2.Hello),
        (plan.ModelCard, worker_pb2.ModelCard),
        (plan.PageUnits, worker_pb2.PageUnits),
        (plan.TierUnits, worker_pb2.TierUnits),
        (plan.PullReport, worker_pb2.PullReport),
    ],
)
def test_records_and_messages_have_the_same_fields(record: type, message: type) -> None:
    """A field added on one side only would be dropped in silence."""
    names = set(message.DESCRIPTOR.fields_by_name)  # type: ignore[attr-defined]
    names -= {"plain", "progress_at", "plain_decodes", "decodes_at"}  # other forms of `progress` and `decodes`
    assert {f.name for f in dataclasses.fields(record)} == names
