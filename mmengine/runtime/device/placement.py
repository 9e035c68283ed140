"""The device, the dtype and the attention backend with which an engine computes."""

from dataclasses import dataclass

import torch

from mmengine.runtime.device.port import Device


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, the dtype of weights, hidden states and KV pool, and the name of an attention backend or
    "auto".
    """

    device: Device
    dtype: torch.dtype
    attention: str = "auto"
