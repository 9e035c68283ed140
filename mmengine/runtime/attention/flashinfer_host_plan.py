"""Holds the buffers into which FlashInfer's wrappers write their plans.

A wrapper makes its plan on the host, in a pinned buffer, and copies it to the device asynchronously. With two
steps in flight the next plan is made before this copy has run. So there are two pinned buffers, used in turn,
and a buffer is overwritten only after its last copy is done. Wrappers that share a HostPlan also share the
plan's buffer on the device: a plan is valid until a wrapper makes the next plan.
"""

from typing import Any

import torch

from mmengine.errors import ConfigError
from mmengine.extras import install_hint
from mmengine.runtime.device.port import Device, Event

WORKSPACE_BYTES = 8 * 2**20  # the size that the wrappers of 0.7.2 allocate
PINNED = "_pin_memory_int_workspace_buffer"  # attribute of a wrapper; there is no public way to set it


class HostPlan:
    """Two pinned plan buffers and a device buffer.

    `events`: one event per pinned buffer, recorded after its copy (default: new events from the device).
    """

    def __init__(self, device: Device, events: tuple[Event, Event] | None = None) -> None:
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device.torch_device)
        self._pinned = tuple(
            torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=device.pins_memory) for _ in range(2)
        )
        self._copied = events or (device.event(), device.event())
        self._turn = 0

    def attach(self, wrapper: Any, floats: torch.Tensor) -> Any:
        """Make `wrapper` use these buffers for its plans, and `floats` as its workspace.

        Returns the wrapper.
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
        # This copy belongs to the plan before last, so with two steps in flight it is normally done.
        self._copied[self._turn].synchronize()
        setattr(wrapper, PINNED, self._pinned[self._turn])
        wrapper.plan(*arguments, **options)
        self._copied[self._turn].record()
