"""The integer inputs of a step, taken to the device in one copy."""

from dataclasses import dataclass

import numpy as np
import torch

from mmengine.core.executor import PENDING, StepPlan
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.upload import upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """t tokens, s sampling rows, f blocks; int64 tensors on the device."""

    input_ids: torch.Tensor  # [t]
    positions: torch.Tensor  # [3, t]
    attention: AttentionMeta
    sample_tokens: torch.Tensor | None  # [s] places in the batch; None: every token, in order
    fresh_blocks: torch.Tensor  # [f] blocks whose first slot is written in this step
    pending: torch.Tensor  # [2, p] places in the batch whose token a step before sampled, and their rows


def prepare(plan: StepPlan, rows: RowColumns, block_size: int, device: torch.device) -> StepInputs:
    """Pack what the step needs into one int64 buffer, upload it, and cut it up again."""
    num_rows, num_tokens = len(plan.rows), len(plan.input_ids)
    table_width = plan.block_table.shape[1]
    kv_lens = plan.num_computed + plan.num_scheduled
    first_slots = plan.slot_mapping[plan.slot_mapping % block_size == 0]
    sample_tokens = _sample_tokens(plan)
    pending = np.flatnonzero(plan.input_ids == PENDING)
    pending_rows = plan.rows[np.searchsorted(np.cumsum(plan.num_scheduled), pending, side="right")]
    parts = (
        plan.input_ids,
        rows.positions(plan.rows, plan.num_scheduled, plan.num_computed, plan.token_index).reshape(-1),
        plan.slot_mapping,
        kv_lens,
        plan.block_table.reshape(-1),
        first_slots // block_size,
        plan.sample[:0] if sample_tokens is None else sample_tokens,
        pending,
        pending_rows,
    )
    packed = upload(np.concatenate(parts, dtype=np.int64, casting="same_kind"), device)
    input_ids, positions, slots, lens, table, fresh, sampled, *waits = packed.split(
        [len(part) for part in parts]
    )
    return StepInputs(
        input_ids=input_ids,
        positions=positions.view(3, num_tokens),
        attention=AttentionMeta(
            query_lens=plan.num_scheduled,
            kv_lens=kv_lens,
            slot_mapping=slots,
            block_table=table.view(num_rows, table_width),
            kv_lens_device=lens,
        ),
        sample_tokens=None if sample_tokens is None else sampled,
        fresh_blocks=fresh,
        pending=torch.stack(waits),
    )


def _sample_tokens(plan: StepPlan) -> np.ndarray | None:
    """Places of the sampling rows' last tokens, or None where that is every token in order."""
    if len(plan.sample) == len(plan.input_ids) and (plan.sample == np.arange(len(plan.sample))).all():
        return None
    return np.cumsum(plan.num_scheduled)[plan.sample] - 1
