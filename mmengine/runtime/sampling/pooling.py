"""Computes the results of prefill-only requests from the last hidden states: embeddings, or a few logits."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from mmengine.core.executor import PooledVector, StepPlan
from mmengine.runtime.device.upload import upload


class PooledRow(NamedTuple):
    """A pooled row's vector on the device, float32 [d]."""

    row: int
    vector: torch.Tensor


def pool_rows(
    plan: StepPlan,
    hidden: torch.Tensor,
    places: np.ndarray | None,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[PooledRow, ...]:
    """Return vectors for the plan's pooled rows, without waiting for the device.

    `hidden`: the step's normed hidden states. `places`: indices of the plan's n tokens in `hidden`, intp [n].
    None: these tokens are the first n. `logits_of`: returns the logits of hidden states.
    """
    if not plan.pool:
        return ()
    index = np.array([place for place, _ in plan.pool], np.int64)
    last = np.cumsum(plan.num_scheduled, dtype=np.int64)[index] - 1
    if places is not None:
        last = places[last].astype(np.int64)
    states = hidden.index_select(0, upload(last, hidden.device))
    rows = plan.rows[index].tolist()
    wanting = [number for number, (_, pooling) in enumerate(plan.pool) if pooling.kind == "logits"]
    vectors = {number: states[number].float() for number in range(len(rows)) if number not in set(wanting)}
    if wanting:
        logits = logits_of(states[upload(np.array(wanting, np.int64), hidden.device)])
        for number, of_row in zip(wanting, logits, strict=True):
            token_ids = np.array(plan.pool[number][1].token_ids, np.int64)
            vectors[number] = of_row[upload(token_ids, hidden.device)].float()
    return tuple(PooledRow(row, vectors[number]) for number, row in enumerate(rows))


def vectors_of(pooled: tuple[PooledRow, ...]) -> tuple[PooledVector, ...]:
    """Return the vectors on the host. Waits for the device."""
    return tuple(PooledVector.of(row, vector.cpu().numpy()) for row, vector in pooled)
