"""The runtime's device interface: memory, events, streams, captured graphs, ranks.

A device is an entry point in the group `mmengine.devices`, named after its kind ("npu"), that loads a class
with the methods below. Its tensors are torch tensors. If `torch_device` is a CPU, sampling and attention use
their CPU code; all other devices' tensors are copied through pinned memory without waiting.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Event(Protocol):
    """A mark in a stream of work, like torch's events."""

    def record(self) -> None:
        """Place the mark after all work launched so far on the current device's current stream."""

    def query(self) -> bool:
        """Return whether the work before the mark is done."""

    def synchronize(self) -> None:
        """Wait until the work before the mark is done."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the ms from this mark to `end_event`; both are `timed` and done."""


class CopyStream(Protocol):
    """A queue for copies that run in order, in parallel with the computation."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        """Run `copies`, which read or write `staged`, after the computation launched so far."""

    def join(self) -> None:
        """Make later computation wait for the copies."""


class Recorder(Protocol):
    """Captures a function's launches, to repeat them with a single launch."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats `compute`'s work on the same tensors.

        `compute` may be called several times during the capture; its exceptions are raised.
        """


class Meter(Protocol):
    """Measures peak memory use."""

    def reset(self) -> None:
        """Reset the peak."""

    def peak(self) -> int:
        """Return the peak since `reset`, in bytes above the memory in use at that time."""


class Device(Protocol):
    """A device that this process uses. Creating a Device does not touch the hardware; call `problem`
    first.
    """

    kind: str
    """The name that users type before ":N", and of the entry point."""

    name: str
    """`kind`, or "kind:N" if a number was given."""

    torch_device: torch.device

    is_async: bool
    """Whether launched work runs asynchronously: steps are then launched ahead and awaited."""

    has_own_memory: bool
    """Whether the device has its own memory, which is measured and divided when an engine starts."""

    pins_memory: bool
    """Whether blocks are swapped to pinned host memory."""

    attention: tuple[str, ...]
    """The backends that attention "auto" tries in order before torch's, which works everywhere."""

    invariant_attention: str
    """The attention backend whose bits can be independent of the batch."""

    embedded_dtype: str
    """The dtype name for "auto" with the embedded checkpoint; other checkpoints use bfloat16."""

    @classmethod
    def is_available(cls) -> bool:
        """Return whether device "auto" chooses this kind, without initialising the device."""

    @classmethod
    def count(cls) -> int:
        """Return how many such devices torch sees."""

    @classmethod
    def problem(cls, index: int | None) -> str | None:
        """Return why this kind's device `index` cannot be used and what to do, in a sentence, or None."""

    @classmethod
    def describe(cls) -> list[str]:
        """Return a line with name and memory for each usable device."""

    def __init__(self, index: int | None = None) -> None: ...

    def of_rank(self, rank: int, size: int) -> "Device":
        """Return the device for rank `rank` among `size` in a sharded model. Raises ConfigError."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which kernels outside torch launch on this device from this thread."""

    def set_current(self) -> None:
        """Make this the thread's current device from now on."""

    def answers(self) -> bool:
        """Return whether the device still computes. Called after an error; False means the process must
        restart.
        """

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the CUDA compute capability, by which kernels are chosen; None for devices that are not CUDA
        GPUs.
        """

    def num_processors(self) -> int:
        """Return how many thread blocks run at once; 0 if unknown."""

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event that is not recorded yet."""

    def recorder(self) -> Recorder | None:
        """Return a recorder, or None if the device cannot capture."""

    def is_capturing(self) -> bool:
        """Return whether launches are being captured, not run."""

    def copy_stream(self) -> CopyStream:
        """Return a new stream for copies."""

    def memory(self) -> tuple[int, int]:
        """Return available and total memory in bytes; the host's for a device without its own memory."""

    def release_unused(self) -> None:
        """Release unused memory that torch's allocator keeps."""

    def meter(self) -> Meter | None:
        """Return a meter for the device's own memory, or None if it has none."""

    def process_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a torch.distributed backend through which ranks exchange tensors; all ranks call this at the
        same time.

        Raises RuntimeError, AttributeError or ValueError if the ranks cannot connect.
        """

    def abort_group(self, group: Any) -> None:
        """Stop all launched work from waiting for a rank that is gone."""
