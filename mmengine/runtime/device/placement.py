"""The device, the dtype and the attention backend with which an engine computes."""

from dataclasses import dataclass

import torch

from mmengine.runtime.device.port import Device


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, a dtype for weights, hidden states and KV pool, and an attention backend (or "auto")."""

    device: Device
    dtype: torch.dtype
    attention: str = "auto"
