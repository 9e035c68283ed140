"""Where an engine computes, and how."""

from dataclasses import dataclass

import torch

from mmengine.runtime.device.port import Device


@dataclass(frozen=True, slots=True)
class Placement:
    """`dtype`: of weights, hidden states and the KV pool. `attention`: the name of a backend, or "auto"."""

    device: Device
    dtype: torch.dtype
    attention: str = "auto"
