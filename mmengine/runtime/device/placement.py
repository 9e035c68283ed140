"""The device and dtype that an engine computes with."""

from dataclasses import dataclass

import torch

from mmengine.runtime.device.port import Device


@dataclass(frozen=True, slots=True)
class Placement:
    """`dtype`: for weights, hidden states and the KV pool. `attention`: a backend's name, or "auto"."""

    device: Device
    dtype: torch.dtype
    attention: str = "auto"
