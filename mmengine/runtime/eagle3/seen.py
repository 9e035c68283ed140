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
    following: np.ndarray | None = None  # int64 [t], the token behind each; None: as the texts say
