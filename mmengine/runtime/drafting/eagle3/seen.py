"""What a draft head reads of the target."""

import msgspec
import numpy as np
import torch

from mmengine.core.executor import StepPlan
from mmengine.ragged import counting
from mmengine.runtime.device.upload import upload
from mmengine.spec_decode.texts import Texts


class Seen(msgspec.Struct, frozen=True, eq=False):
    """A step of the target, as the head reads it: t tokens of n rows."""

    plan: StepPlan
    positions: torch.Tensor  # int64 [3, t]
    aux_hidden_states: torch.Tensor  # [t, aux_layers * target_hidden_size]


class Unread(msgspec.Struct, frozen=True, eq=False):
    """Tokens for one pass of the head: t in all, of n rows one after the other, those of a row without gaps.
    Behind each of them the next one is known."""

    rows: np.ndarray  # intp [n]
    counts: np.ndarray  # int [n], tokens of each row, at least 1
    starts: np.ndarray  # int [n], place of the first of them in its request
    table: np.ndarray  # int32 [n, b], blocks of each row
    slots: np.ndarray  # int64 [t]
    positions: torch.Tensor  # int64 [3, t]
    aux_hidden_states: torch.Tensor  # [t, aux_layers * target_hidden_size]
    is_all: np.ndarray | None = None  # bool [n], rows of which nothing more waits; None: all


def accepted_tokens(seen: Seen, rows: np.ndarray, selected: np.ndarray, texts: Texts) -> Unread:
    """What stands of `rows[selected]` (intp [n], bool [n]) of the step: behind it the next token is known."""
    plan = seen.plan
    aux_hidden_states, positions, slots = seen.aux_hidden_states, seen.positions, plan.slot_mapping
    starts, table, scheduled = plan.num_computed, plan.block_table, plan.num_scheduled
    firsts = np.cumsum(scheduled) - scheduled
    if not selected.all():
        rows, starts, table = rows[selected], starts[selected], table[selected]
        scheduled, firsts = scheduled[selected], firsts[selected]
    counts = np.minimum(scheduled, texts.lengths[rows] - 1 - starts)
    if len(plan.rows) == 1:  # what stands of a row alone is the step's beginning: nothing is selected
        count = int(counts[0])
        return Unread(
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
    return Unread(rows, counts, starts, table, slots, positions, aux_hidden_states)
