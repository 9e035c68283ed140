"""Holds the buffers into which FlashInfer's wrappers write their plans.

A wrapper makes its plan in a pinned host buffer, and copies the plan to the device asynchronously. With two
steps in flight, the next plan is made before this copy has run. Therefore two pinned buffers alternate, and
each is overwritten only after its last copy has finished. Wrappers that share a HostPlan also share the
device buffer: each plan overwrites the previous plan.
"""

from typing import Any

import torch

from mmengine.errors import ConfigError
from mmengine.extras import install_hint
from mmengine.runtime.device.port import Device, Event

WORKSPACE_BYTES = 8 * 2**20  # the size that the wrappers of 0.7.2 allocate
PINNED = "_pin_memory_int_workspace_buffer"  # a private attribute, because wrappers have no public setter


class HostPlan:
    """Two pinned plan buffers and a device buffer.

    `events`: an event for each pinned buffer, recorded after the buffer's copy. By default the device creates
    the events.
    """

    def __init__(self, device: Device, events: tuple[Event, Event] | None = None) -> None:
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device)
        self._pinned = tuple(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=device.pins_memory) for _ in range(2)
        )
        self._copied = events or (device.event(), device.event())
        self._turn = 0

    def attach(self, wrapper: Any, floats: torch.Tensor) -> Any:
        """Make `wrapper` write its plans to these buffers and use `floats` as its workspace. Returns
        `wrapper`.
        """
        if not hasattr(wrapper, PINNED):
            raise ConfigError(
                "this version of FlashInfer stores its plans differently; install flashinfer-python 0.7.2 "
                f"({install_hint('cuda')}), or choose attention 'torch'"
            )
        wrapper.reset_workspace_buffer(floats, self._workspace)
        setattr(wrapper, PINNED, self._pinned[0])
        return wrapper

    def plan(self, wrapper: Any, *arguments: Any, **options: Any) -> None:
        """Call `wrapper.plan(...)` without waiting for the device."""
        self._turn = 1 - self._turn
        # The event was recorded two plans ago, so the copy has normally finished.
        self._copied[self._turn].synchronize()
        setattr(wrapper, PINNED, self._pinned[self._turn])
        wrapper.plan(*arguments, **options)
        self._copied[self._turn].record()
