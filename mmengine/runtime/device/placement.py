"""The device and dtype that an engine computes with."""

from dataclasses import dataclass

import torch

from mmengine.runtime.device.port import Device


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, the dtype for weights, hidden states and KV pool, and an attention backend's name or
    "auto".
    """

    device: Device
    dtype: torch.dtype
    attention: str = "auto"
