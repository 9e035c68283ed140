"""Builds the integer inputs of a step in one buffer, which is copied to the device in a single transfer."""

import msgspec
import numpy as np
import torch

from mmengine.core.executor import PENDING, StepPlan
from mmengine.runtime.attention.base import AttentionMeta
from mmengine.runtime.device.upload import upload, upload_into
from mmengine.runtime.graphs.buckets import Frame
from mmengine.runtime.rows import RowColumns
from mmengine.runtime.sampling.runs import Runs

_NONE = torch.empty(0, dtype=torch.int64)


class StepInputs(msgspec.Struct, frozen=True, eq=False):
    """The inputs of a step with t tokens, s sampling positions and p pending tokens.

    The tensors are int64 on the device. With a CUDA graph, t is the number of tokens in the captured size
    (the bucket). `attention` always describes the step without padding.
    """

    input_ids: torch.Tensor  # [t]
    positions: torch.Tensor  # [3, t]
    attention: AttentionMeta
    sample_tokens: torch.Tensor | None  # [s], indices of the tokens that sample; None: all tokens sample
    places: np.ndarray | None  # intp [n], indices of the plan's n tokens in the bucket; None: the first n
    pending: torch.Tensor  # [2, p], indices of tokens that the previous step samples, and their rows


def prepare(
    plan: StepPlan,
    runs: Runs | None,
    rows: RowColumns,
    device: torch.device,
    *,
    may_wait: bool,
    frame: Frame | None = None,
    into: torch.Tensor | None = None,
) -> StepInputs:
    """Return the inputs of the step on `device`.

    `runs`: the sampling positions of rows with drafts. `may_wait`: whether tokens may be PENDING (the
    previous step has not sampled them yet). `frame`: the step's bucket, or None without a graph. `into`: the
    input buffer of the captured graph.
    """
    num_tokens = len(plan.input_ids) if frame is None else frame.bucket.num_tokens
    sample_tokens = _sample_tokens(plan) if runs is None else runs.places
    waits = _pending(plan) if may_wait else ()
    places = None if frame is None or isinstance(frame.places, slice) else frame.places
    if places is not None:  # the step has drafts, so no token is PENDING
        sample_tokens = places if sample_tokens is None else places[sample_tokens]
    num_sampled = 0 if sample_tokens is None else len(sample_tokens)
    packed = np.empty(4 * num_tokens + num_sampled + sum(map(len, waits)), dtype=np.int64)
    _place(plan, rows, frame, packed[: 4 * num_tokens].reshape(4, num_tokens))
    end = 4 * num_tokens + num_sampled
    if sample_tokens is not None:
        packed[4 * num_tokens : end] = sample_tokens
    if waits:
        np.concatenate(waits, out=packed[end:], casting="same_kind")
    on_device = upload(packed, device) if into is None else upload_into(packed, into)
    return StepInputs(
        input_ids=on_device[:num_tokens],
        positions=on_device[num_tokens : 4 * num_tokens].view(3, num_tokens),
        attention=AttentionMeta(
            plan.num_scheduled,
            plan.num_computed + plan.num_scheduled,
            plan.slot_mapping,
            plan.block_table,
            plan.num_drafts,
            rows.run_ids(plan),
            plan.windows,
        ),
        sample_tokens=None if sample_tokens is None else on_device[4 * num_tokens : end],
        places=places,
        pending=on_device[end:].view(2, -1) if waits else _NONE.view(2, 0),
    )


def _place(plan: StepPlan, rows: RowColumns, frame: Frame | None, out: np.ndarray) -> None:
    """Write the token ids, then the three rows of positions, to `out`, int64 [4, t]."""
    if frame is None:
        out[0] = plan.input_ids
        rows.positions(plan, out[1:])
        return
    own = np.empty((4, len(plan.input_ids)), np.int64)
    own[0] = plan.input_ids
    rows.positions(plan, own[1:])
    out[:] = 0
    out[:, frame.places] = own


def written_slots(plan: StepPlan) -> np.ndarray:
    """Return the KV slots that the step writes, in all block groups, int64."""
    if not plan.windows:
        return plan.slot_mapping
    return np.concatenate((plan.slot_mapping, *(window.slot_mapping for window in plan.windows)))


def fresh_blocks(slots: np.ndarray, block_size: int) -> np.ndarray:
    """Return the blocks whose first slot is in `slots`, int64 [f]. The step begins to fill these blocks."""
    return slots[slots & (block_size - 1) == 0] // block_size


def _pending(plan: StepPlan) -> tuple[np.ndarray, ...]:
    """Return the indices of the PENDING tokens in the step, and the rows of these tokens."""
    places = np.flatnonzero(plan.input_ids == PENDING)
    return places, plan.rows[np.searchsorted(np.cumsum(plan.num_scheduled), places, side="right")]


def _sample_tokens(plan: StepPlan) -> np.ndarray | None:
    """Return the index of the last token of each sampling row, or None if every token samples."""
    # Each row has at least one token. With as many sampling rows as tokens, each row has exactly one token.
    if len(plan.sample) == len(plan.input_ids):
        return None
    return np.cumsum(plan.num_scheduled)[plan.sample] - 1
