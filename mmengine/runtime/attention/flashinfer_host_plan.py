"""Where the plans of FlashInfer's wrappers are written.

A plan is made on the host, into a pinned buffer that the wrapper keeps, and copied to the device without
waiting. With two steps in flight the next plan is made before that copy ran, so there are two such buffers,
taken in turn, and one is written again only when its last copy is done. Wrappers that share a host
plan share what is on the device too: a plan goes for one of them, until the next plan there.
"""

from typing import Any

import torch

from mmengine.errors import ConfigError
from mmengine.extras import install_hint
from mmengine.runtime.device.port import Device, Event

WORKSPACE_BYTES = 8 * 2**20  # what the wrappers of 0.7.2 make for themselves
PINNED = "_pin_memory_int_workspace_buffer"  # of a wrapper; there is no public way to give it one


class HostPlan:
    """`events`: two of them, one for each pinned buffer; by default those of the device."""

    def __init__(self, device: Device, events: tuple[Event, Event] | None = None) -> None:
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device)
        self._pinned = tuple(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=device.pins_memory) for _ in range(2)
        )
        self._copied = events or (device.event(), device.event())
        self._turn = 0

    def seat(self, wrapper: Any, floats: torch.Tensor) -> Any:
        """Make `wrapper` use this host plan, and `floats` for what it computes in between; gives it back."""
        if not hasattr(wrapper, PINNED):
            raise ConfigError(
                "this version of FlashInfer keeps its plans elsewhere; install flashinfer-python 0.7.2 "
                f"({install_hint('cuda')}), or choose attention 'torch'"
            )
        wrapper.reset_workspace_buffer(floats, self._workspace)
        setattr(wrapper, PINNED, self._pinned[0])
        return wrapper

    def plan(self, wrapper: Any, *arguments: Any, **options: Any) -> None:
        """`wrapper.plan(...)`, which does not wait for the device."""
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()  # with two steps in flight: done long ago
        setattr(wrapper, PINNED, self._pinned[self._turn])
        wrapper.plan(*arguments, **options)
        self._copied[self._turn].record()
