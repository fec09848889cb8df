from __future__ import annotations

from gpu_worker.batching import PlanRun, StepEntry, build_batch
from gpu_worker.sequences import SequenceTable
from tests.worker.fake_runner import CARD
from tests.worker.plans import chunk, decode, grant, plan, release
from wire.plan import StepPlan
from wire.sampling import FinishReason

PAGE = 16


def make_table() -> SequenceTable:
    return SequenceTable(CARD, num_pages=16, page_size=PAGE)


def run_step(entries: list[StepEntry], token: int = 9) -> None:
    """As if the model had run: KV written, a token sampled."""
    for entry in entries:
        samples = entry.samples
        entry.sequence.advance(entry.end)
        if samples:
            entry.sequence.token_ids.append(token)


def first_step(table: SequenceTable, step_plan: StepPlan) -> list[StepEntry]:
    entries = PlanRun(step_plan, table).first_step()
    run_step(entries)
    return entries


def spans(entries: list[StepEntry]) -> list[tuple[int, int, int]]:
    return [(e.sequence.seq_id, e.start, e.end) for e in entries]


def test_a_mixed_batch_of_a_decode_and_a_chunk() -> None:
    table = make_table()
    first_step(table, plan(1, chunks=[chunk(1, 0, 17, tokens=range(1, 18), pages=grant([5, 3], 32))]))
    run = PlanRun(
        plan(2, chunks=[chunk(2, 0, 2, tokens=[21, 22, 23], pages=grant([7], 16))], decodes=[decode(1)]), table
    )
    batch = build_batch(run.first_step(), PAGE)
    assert batch.token_ids == [9, 21, 22]
    assert batch.positions == [17, 0, 1]
    assert batch.slot_mapping == [3 * PAGE + 1, 7 * PAGE, 7 * PAGE + 1]
    assert batch.query_lens == [1, 2]
    assert batch.context_lens == [18, 2]
    assert batch.block_tables == [[5, 3], [7]]
    assert batch.logit_rows == [0]  # the chunk does not end its prompt


def test_block_tables_cover_the_context_only() -> None:
    table = make_table()
    entries = first_step(table, plan(1, chunks=[chunk(1, 0, 16, tokens=range(1, 30), pages=grant([1, 2], 32))]))
    assert build_batch(entries, PAGE).block_tables == [[1]]


def test_chunks_run_in_the_first_step_and_join_the_decodes_only_when_they_end_the_tokens() -> None:
    table = make_table()
    run = PlanRun(
        plan(
            1,
            chunks=[
                chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16)),
                chunk(2, 0, 2, tokens=[4, 5, 6], pages=grant([2], 16)),
            ],
            max_steps=4,
        ),
        table,
    )
    entries = run.first_step()
    assert spans(entries) == [(1, 0, 3), (2, 0, 2)]
    assert [e.samples for e in entries] == [True, False]
    run_step(entries)
    assert spans(run.next_step()) == [(1, 3, 4)]


def test_a_sequence_named_as_chunk_and_decode_runs_once_a_step() -> None:
    table = make_table()
    step_plan = plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))], decodes=[decode(1)])
    run = PlanRun(step_plan, table)
    entries = run.first_step()
    assert spans(entries) == [(1, 0, 3)]
    run_step(entries)
    assert spans(run.next_step()) == [(1, 3, 4)]


def test_a_decode_waits_at_its_grant_until_a_new_one_comes() -> None:
    table = make_table()
    first_step(table, plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 4))]))
    run = PlanRun(plan(2, decodes=[decode(1)], max_steps=8), table)
    entries = run.first_step()
    assert spans(entries) == [(1, 3, 4)]
    run_step(entries)
    assert run.next_step() == []
    assert PlanRun(plan(3, decodes=[decode(1)]), table).first_step() == []
    assert spans(PlanRun(plan(4, decodes=[decode(1, grant([1], 16))]), table).first_step()) == [(1, 4, 5)]


def test_a_decode_of_an_unfinished_prompt_does_not_run() -> None:
    table = make_table()
    first_step(table, plan(1, chunks=[chunk(1, 0, 2, tokens=[1, 2, 3, 4], pages=grant([1], 16))]))
    assert PlanRun(plan(2, decodes=[decode(1)]), table).first_step() == []


def test_late_plans_about_unknown_sequences_or_old_incarnations_are_ignored() -> None:
    table = make_table()
    first_step(table, plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16), incarnation=2)]))
    run = PlanRun(
        plan(
            2,
            chunks=[chunk(1, 3, 1, incarnation=1), chunk(7, 0, 1)],
            decodes=[decode(1, grant([9], 16), incarnation=1), decode(8)],
            releases=[release(1, incarnation=1), release(9)],
        ),
        table,
    )
    assert run.first_step() == []
    assert run.refused == []
    assert len(table) == 1
    assert next(iter(table)).block_table == [1]


def test_releases_come_first_so_a_page_may_go_to_another_sequence_in_the_same_plan() -> None:
    table = make_table()
    first_step(table, plan(1, chunks=[chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16))]))
    run = PlanRun(
        plan(
            2,
            releases=[release(1)],
            chunks=[chunk(2, 0, 2, tokens=[4, 5], pages=grant([1], 16))],
            decodes=[decode(1)],
        ),
        table,
    )
    assert spans(run.first_step()) == [(2, 0, 2)]


def test_a_sequence_that_cannot_run_ends_in_an_error_alone() -> None:
    table = make_table()
    run = PlanRun(
        plan(
            1,
            chunks=[
                chunk(1, 0, 3, tokens=[1, 2, 3], pages=grant([1], 16), children=[(1, 0), (5, 1)]),
                chunk(2, 0, 2, tokens=[4, 5], pages=grant([2], 16)),
            ],
        ),
        table,
    )
    assert spans(run.first_step()) == [(2, 0, 2)]
    assert [(p.seq_id, p.finish_reason) for p in run.refused] == [(1, FinishReason.ERROR)]
    assert "children" in (run.refused[0].error or "")
    assert [s.seq_id for s in table] == [2]


def test_a_chunk_samples_for_the_choice_of_its_child() -> None:
    table = make_table()
    first_step(table, plan(1, chunks=[chunk(1, 0, 2, tokens=[1, 2], pages=grant([1], 16), children=[(1, 3)])]))
    assert next(iter(table)).choice == 3


def test_a_plan_that_names_a_sequence_twice_steps_it_once() -> None:
    table = make_table()
    first_step(table, plan(1, chunks=[chunk(1, 0, 2, tokens=[1, 2], pages=grant([1], 16))]))
    assert spans(PlanRun(plan(2, decodes=[decode(1), decode(1)]), table).first_step()) == [(1, 2, 3)]


def test_two_chunks_of_one_sequence_in_a_plan_end_it_in_an_error() -> None:
    table = make_table()
    chunks = [chunk(1, 0, 2, tokens=[1, 2, 3], pages=grant([1], 16)), chunk(1, 2, 1)]
    run = PlanRun(plan(1, chunks=chunks), table)
    assert run.first_step() == []
    assert [p.finish_reason for p in run.refused] == [FinishReason.ERROR]
