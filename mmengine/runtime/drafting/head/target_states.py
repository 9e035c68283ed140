"""Selects the target model's hidden states that a draft head reads."""

import msgspec
import numpy as np
import torch

from mmengine.core.executor import StepPlan
from mmengine.ragged import counting
from mmengine.runtime.device.upload import upload
from mmengine.spec_decode.texts import Texts


class TargetStates(msgspec.Struct, frozen=True, eq=False):
    """The hidden states that the target model computes in a step with t tokens."""

    plan: StepPlan
    positions: torch.Tensor  # int64 [3, t]
    aux_hidden_states: torch.Tensor  # [t, aux_layers * target_hidden_size]


class HeadBatch(msgspec.Struct, frozen=True, eq=False):
    """The t tokens, in n rows, that the head reads in one pass.

    A row's tokens are adjacent and have consecutive positions. Each token's successor is known.
    """

    rows: np.ndarray  # intp [n]
    counts: np.ndarray  # int [n], number of tokens of each row, at least 1
    starts: np.ndarray  # int [n], position of the first token of each row in its request
    table: np.ndarray  # int32 [n, b], the block table of each row
    slots: np.ndarray  # int64 [t]
    positions: torch.Tensor  # int64 [3, t]
    aux_hidden_states: torch.Tensor  # [t, aux_layers * target_hidden_size]
    # bool [n], whether the pass reads all unread tokens in the row; None: all True
    is_all: np.ndarray | None = None


def accepted_tokens(states: TargetStates, rows: np.ndarray, selected: np.ndarray, texts: Texts) -> HeadBatch:
    """Return the step's tokens in `rows[selected]` that the head can read. `rows`: intp [n], `selected`:
    bool [n].

    Rejected drafts, and tokens without a known next token, are left out.
    """
    plan = states.plan
    aux_hidden_states, positions, slots = states.aux_hidden_states, states.positions, plan.slot_mapping
    starts, table, scheduled = plan.num_computed, plan.block_table, plan.num_scheduled
    firsts = np.cumsum(scheduled) - scheduled
    if not selected.all():
        rows, starts, table = rows[selected], starts[selected], table[selected]
        scheduled, firsts = scheduled[selected], firsts[selected]
    counts = np.minimum(scheduled, texts.lengths[rows] - 1 - starts)
    if len(plan.rows) == 1:  # with a single row, the accepted tokens are the step's first tokens
        count = int(counts[0])
        return HeadBatch(
            rows, counts, starts, table, slots[:count], positions[:, :count], aux_hidden_states[:count]
        )
    if int(counts.sum()) < len(slots):
        places = counting(counts) + np.repeat(firsts, counts)
        index = upload(places, aux_hidden_states.device)
        slots, positions, aux_hidden_states = (
            slots[places],
            positions.index_select(1, index),
            aux_hidden_states.index_select(0, index),
        )
    return HeadBatch(rows, counts, starts, table, slots, positions, aux_hidden_states)
