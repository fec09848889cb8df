"""One step's work as flat host lists: what the pure batch builder makes and the model runner consumes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class StepBatch:
    """A mixed batch of prefill chunks and decodes; a decode is a query of one token.

    Sequence i owns query rows [q_start_i, q_start_i + query_lens[i]) and attends to its own KV positions
    [0, context_lens[i]); its queries are the LAST query_lens[i] of those positions (causal, bottom-right).
    """

    token_ids: list[int] = field(default_factory=list)  # [num_tokens]
    positions: list[int] = field(default_factory=list)  # [num_tokens]
    slot_mapping: list[int] = field(default_factory=list)  # [num_tokens], page_id * page_size + offset
    query_lens: list[int] = field(default_factory=list)  # [num_seqs]
    context_lens: list[int] = field(default_factory=list)  # [num_seqs], this step's tokens included
    block_tables: list[list[int]] = field(default_factory=list)  # [num_seqs][ceil(context_len / page_size)]
    logit_rows: list[int] = field(default_factory=list)  # rows of [num_tokens] whose logits are wanted
    fed_rows: list[tuple[int, int]] = field(default_factory=list)
    """(row of [num_tokens], i): its token is the i-th drawn in the step before, which only the device may know."""
