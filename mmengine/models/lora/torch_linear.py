"""Adds LoRA adapters' products to linear layers in torch, on CPUs without compiled kernels and on GPUs. This
module has not been run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmengine.native.lora import LoraPart

Linear = Callable[[Tensor], Tensor]


class AddedRows(NamedTuple):
    """Additions to a linear layer's output for some tokens in a step."""

    rows: Tensor  # int64 [n]
    parts: tuple[LoraPart, ...]


def add_parts(x: Tensor, y: Tensor, parts: Sequence[LoraPart]) -> None:
    """Add each part's scaled product with x [m, k] to y [m, n], in place."""
    for a, b, offset, scale in parts:
        y[:, offset : offset + len(b)] += (x @ a.t() @ b.t()) * scale


def with_rows(linear: Linear, added: Sequence[AddedRows]) -> Linear:
    """Return a linear layer that adds each entry's parts to its rows in the output of `linear`."""
    if not added:
        return linear

    def run(x: Tensor) -> Tensor:
        y = linear(x)
        for rows, parts in added:
            own = y.index_select(0, rows)
            add_parts(x.index_select(0, rows), own, parts)
            y.index_copy_(0, rows, own)
        return y

    return run


def rows_on(rows: object, device: torch.device) -> Tensor:
    """Return numpy row indices, int32 [n], as an int64 tensor on `device`."""
    return torch.as_tensor(rows, dtype=torch.int64).to(device)
