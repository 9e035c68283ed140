"""The device interface: memory, events, streams, captured graphs and ranks.

A third-party device is an entry point in the group `mmengine.devices`. Its name is the device's kind (such as
"npu"), and it loads a class that implements Device. Its tensors are torch tensors. If `torch_device` is a
CPU, sampling and attention use their CPU code. To any other device the runtime copies host arrays
asynchronously, through pinned memory.
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
        """Return the milliseconds from this mark to `end_event`.

        Both events were created `timed` and are done.
        """


class CopyStream(Protocol):
    """A queue for copies that run one after the other, in parallel with the computation."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        """Run `copies` after the computation launched so far.

        They read or write `staged`, which is kept until they have run.
        """

    def join(self) -> None:
        """Make computation that is launched later wait for all copies."""


class Recorder(Protocol):
    """Captures what a function launches on the device, so that one launch can replay it."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `compute`'s work on the same tensors.

        `compute` may be called several times for the capture. Exceptions that it raises are passed on.
        """


class Meter(Protocol):
    """Measures peak memory use."""

    def reset(self) -> None:
        """Reset the peak."""

    def peak(self) -> int:
        """Return the peak since `reset`, in bytes above the memory in use at that time."""


class Device(Protocol):
    """A device that this process uses.

    Call `problem` first: creating a Device does not touch the hardware.
    """

    kind: str
    """The entry point's name, which is also the name that users type (before ":N")."""

    name: str
    """`kind`, or "kind:N" if a number was given."""

    torch_device: torch.device

    is_async: bool
    """Whether launched work runs asynchronously.

    If so, a step is launched before the last one has finished.
    """

    has_own_memory: bool
    """Whether the device has its own memory. If so, an engine measures and divides it when it starts."""

    pins_memory: bool
    """Whether blocks are swapped to pinned host memory."""

    attention: tuple[str, ...]
    """The backends that attention "auto" tries in order before torch's, which works everywhere."""

    invariant_attention: str
    """The attention backend whose bits can be independent of the batch."""

    embedded_dtype: str
    """The name of the dtype that "auto" chooses for the embedded checkpoint. For others: mmengine.build."""

    @classmethod
    def is_available(cls) -> bool:
        """Return whether device "auto" may choose this kind. Does not initialise the device."""

    @classmethod
    def count(cls) -> int:
        """Return how many such devices torch sees."""

    @classmethod
    def problem(cls, index: int | None) -> str | None:
        """Return why this kind's device `index` cannot be used and what to do about it, or None if it can."""

    @classmethod
    def describe(cls) -> list[str]:
        """Return one line for each such device, with its name and memory."""

    def __init__(self, index: int | None = None) -> None: ...

    def of_rank(self, rank: int, size: int) -> "Device":
        """Return the device for rank `rank` among `size` in a sharded model. Raises ConfigError."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this is the thread's current device, where kernels outside torch
        launch.
        """

    def set_current(self) -> None:
        """Make this the thread's current device from now on."""

    def answers(self) -> bool:
        """Return whether the device still computes. Called after an error.

        If the result is False, the process must restart.
        """

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the CUDA compute capability, which decides the choice of kernels; None if this is no
        CUDA GPU.
        """

    def num_processors(self) -> int:
        """Return how many processors run thread blocks (SMs on a GPU); 0 if unknown."""

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event that is not recorded yet."""

    def recorder(self) -> Recorder | None:
        """Return a recorder, or None if the device cannot capture."""

    def is_capturing(self) -> bool:
        """Return whether launches are being captured at the moment, so that they do not run."""

    def copy_stream(self) -> CopyStream:
        """Return a new stream for copies."""

    def memory(self) -> tuple[int, int]:
        """Return (available, total) memory in bytes.

        Without its own memory, a device reports the host's.
        """

    def release_unused(self) -> None:
        """Release the memory that torch's allocator caches but does not use."""

    def meter(self) -> Meter | None:
        """Return a meter for the device's own memory, or None if it has none."""

    def process_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a torch.distributed backend through which ranks exchange tensors.

        All ranks must call this at the same time.

        Raises RuntimeError, AttributeError or ValueError if the ranks cannot connect.
        """

    def abort_group(self, group: Any) -> None:
        """End all launched work that waits for a rank that is gone."""
