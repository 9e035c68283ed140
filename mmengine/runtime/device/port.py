"""The interface for devices: memory, events, streams, captured graphs and ranks.

A third-party device registers a class that implements Device as an entry point in the group
`mmengine.devices`. The entry point's name is the device's kind, such as "npu". Tensors on the device must be
torch tensors. If `torch_device` is a CPU, sampling and attention use their CPU code. To other devices, the
runtime copies host arrays asynchronously, through pinned memory.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Event(Protocol):
    """A device event, like the events of torch on a GPU."""

    def record(self) -> None:
        """Record the event on the current device's current stream."""

    def query(self) -> bool:
        """Return whether the work before the event is done."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the time from this event to `end_event`, in ms.

        Both events must have been created with `timed`, and must be done.
        """


class CopyStream(Protocol):
    """A queue of copies that run one after another, in parallel with the computation."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        """Run `copies` after the computation that was launched so far.

        The stream keeps `staged`, the copies' buffer, until the copies have run.
        """

    def join(self) -> None:
        """Delay all computation that is launched later until the copies in this queue have run."""


class Recorder(Protocol):
    """Captures the work that a function launches on the device, for replays with a single launch."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that replays `compute`'s work on the same tensors.

        `compute` may be called several times for the capture. Its exceptions are passed on to the caller.
        """


class Meter(Protocol):
    """Measures peak memory use."""

    def reset(self) -> None:
        """Begin a new measurement."""

    def peak(self) -> int:
        """Return the peak since `reset`, in bytes above the memory that was in use at `reset`."""


class Device(Protocol):
    """A device that this process uses.

    Call `problem` before creating a Device, because the constructor does not check the hardware.
    """

    kind: str
    """The entry point's name. Users select a device as `kind` or "kind:N"."""

    name: str
    """`kind`, or "kind:N" if a number was given."""

    torch_device: torch.device

    is_async: bool
    """Whether launched work runs asynchronously.

    If so, a step is launched before the previous step has finished.
    """

    has_own_memory: bool
    """Whether the device has its own memory. If so, an engine measures and divides the memory when it
    starts.
    """

    pins_memory: bool
    """Whether blocks are swapped to pinned host memory."""

    attention: tuple[str, ...]
    """The backends that attention "auto" tries, in order. If none works, torch's backend is used."""

    invariant_attention: str
    """The attention backend for batch-invariant results."""

    embedded_dtype: str
    """The dtype that "auto" selects for the included checkpoint, by name. For other checkpoints,
    mmengine.build selects the dtype.
    """

    @classmethod
    def is_available(cls) -> bool:
        """Return whether the device setting "auto" may select this kind. Does not initialise the device."""

    @classmethod
    def count(cls) -> int:
        """Return how many devices of this kind torch sees."""

    @classmethod
    def problem(cls, index: int | None) -> str | None:
        """Return why device `index` of this kind cannot be used, and the remedy. None if the device can be
        used.
        """

    @classmethod
    def describe(cls) -> list[str]:
        """Return one line for each device of this kind, with its name and memory."""

    def __init__(self, index: int | None = None) -> None: ...

    def of_rank(self, rank: int, size: int) -> "Device":
        """Return the device for rank `rank` among `size` in a sharded model. Raises ConfigError."""

    def current(self) -> AbstractContextManager[object]:
        """Return a context in which this device is the thread's current device. Custom kernels are launched
        on the current device.
        """

    def set_current(self) -> None:
        """Make this device the thread's current device from now on."""

    def answers(self) -> bool:
        """Return whether the device still computes after an error. If not, the process must be restarted."""

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the CUDA compute capability, or None if this is no CUDA GPU."""

    def num_processors(self) -> int:
        """Return how many processors run thread blocks (a GPU's SMs); 0 if unknown."""

    def event(self, *, timed: bool = False) -> Event:
        """Return a new event, which is not recorded yet."""

    def recorder(self) -> Recorder | None:
        """Return a recorder, or None if the device cannot capture work."""

    def is_capturing(self) -> bool:
        """Return whether launches are currently captured instead of run."""

    def copy_stream(self) -> CopyStream:
        """Return a new stream for copies."""

    def memory(self) -> tuple[int, int]:
        """Return (available, total) memory in bytes.

        A device without its own memory reports the host's memory.
        """

    def release_unused(self) -> None:
        """Release memory that torch's allocator caches without using it."""

    def meter(self) -> Meter | None:
        """Return a meter for the device's own memory, or None if the device has no memory of its own."""

    def process_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a torch.distributed backend through which ranks exchange tensors.

        All ranks must call this method at the same time. Raises RuntimeError, AttributeError or ValueError if
        the ranks cannot connect.
        """

    def abort_group(self, group: Any) -> None:
        """End launched work that waits for a rank whose process has ended."""
