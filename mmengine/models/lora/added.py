"""What adapters add to linear layers in torch: on devices without kernels of their own, and on a GPU, where
it has not been run yet."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mmengine.native.lora import LoraPart

Linear = Callable[[Tensor], Tensor]


class AddedRows(NamedTuple):
    """What is added to one linear layer for some rows of a step."""

    rows: Tensor  # int64 [n]
    parts: tuple[LoraPart, ...]


def add_parts(x: Tensor, y: Tensor, parts: Sequence[LoraPart]) -> None:
    """To all rows of y [m, n] what those of x [m, k] give."""
    for a, b, offset, scale in parts:
        y[:, offset : offset + len(b)] += (x @ a.t() @ b.t()) * scale


def with_rows(linear: Linear, added: Sequence[AddedRows]) -> Linear:
    """The linear layer with what is added to it in a step."""
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
    """int32 [n] of numpy as int64 on a device."""
    return torch.as_tensor(rows, dtype=torch.int64).to(device)
