"""Selects rows of a device tensor by host indices."""

from collections.abc import Callable

import numpy as np
import torch

from mmengine.runtime.device.upload import upload


def take(tensor: torch.Tensor, selected: np.ndarray) -> torch.Tensor:
    """Return the rows `selected` (ascending indices) from `tensor`.

    If all rows are selected, the result is the tensor itself, otherwise a copy.
    """
    if len(selected) == len(tensor):
        return tensor
    return tensor.index_select(0, upload(selected, tensor.device))


def on_rows(
    logits: torch.Tensor, selected: np.ndarray, change: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return `logits` with `change` applied to the rows `selected` (ascending indices), possibly in place."""
    if len(selected) == len(logits):
        return change(logits)
    index = upload(selected, logits.device)
    logits[index] = change(logits[index])
    return logits
