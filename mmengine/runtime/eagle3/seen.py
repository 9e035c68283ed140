"""What a draft head reads of the target."""

import msgspec
import numpy as np
import torch

from mmengine.core.executor import StepPlan


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
