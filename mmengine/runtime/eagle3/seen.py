"""What a draft head reads of the target."""

import msgspec
import numpy as np
import torch

from mmengine.core.executor import StepPlan
from mmengine.ragged import counting
from mmengine.runtime.upload import upload
from mmengine.spec_decode.texts import Texts


class Seen(msgspec.Struct, frozen=True, eq=False):
    """A step of the target, as the head reads it: t tokens of n rows."""

    plan: StepPlan
    positions: torch.Tensor  # int64 [3, t]
    taps: torch.Tensor  # [t, taps * target_hidden_size]


class Unread(msgspec.Struct, frozen=True, eq=False):
    """Tokens for one pass of the head: t in all, of n rows one after the other, those of a row without gaps.
    Behind each of them the next one is known."""

    rows: np.ndarray  # intp [n]
    counts: np.ndarray  # int [n], tokens of each row, at least 1
    starts: np.ndarray  # int [n], place of the first of them in its request
    table: np.ndarray  # int32 [n, b], blocks of each row
    slots: np.ndarray  # int64 [t]
    positions: torch.Tensor  # int64 [3, t]
    taps: torch.Tensor  # [t, taps * target_hidden_size]
    is_all: np.ndarray | None = None  # bool [n], rows of which nothing more waits; None: all


def standing(seen: Seen, rows: np.ndarray, picked: np.ndarray, texts: Texts) -> Unread:
    """What stands of `rows[picked]` (intp [n], bool [n]) of the step: behind it the next token is known."""
    plan = seen.plan
    taps, positions, slots = seen.taps, seen.positions, plan.slot_mapping
    starts, table, scheduled = plan.num_computed, plan.block_table, plan.num_scheduled
    firsts = np.cumsum(scheduled) - scheduled
    if not picked.all():
        rows, starts, table = rows[picked], starts[picked], table[picked]
        scheduled, firsts = scheduled[picked], firsts[picked]
    counts = np.minimum(scheduled, texts.lengths[rows] - 1 - starts)
    if len(plan.rows) == 1:  # what stands of a row alone is the step's beginning: nothing is picked
        count = int(counts[0])
        return Unread(rows, counts, starts, table, slots[:count], positions[:, :count], taps[:count])
    if int(counts.sum()) < len(slots):
        places = counting(counts) + np.repeat(firsts, counts)
        index = upload(places, taps.device)
        slots, positions, taps = slots[places], positions.index_select(1, index), taps.index_select(0, index)
    return Unread(rows, counts, starts, table, slots, positions, taps)
