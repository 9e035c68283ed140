"""What the runtime asks of a device: memory, events, streams, captured graphs, ranks.

A device is an entry point in the group `mmengine.devices`, named as its kind is ("npu"), that loads a class
with the methods below. Its tensors are torch's: where `torch_device` is a CPU, they take the ways of CPUs
through sampling and attention, and any other one's are copied to and from pinned memory without waiting.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Event(Protocol):
    """A mark in a stream of work, as torch's own events are."""

    def record(self) -> None:
        """Put the mark behind what was launched so far on the current stream of the current device."""

    def query(self) -> bool:
        """Whether the work before the mark is done."""

    def synchronize(self) -> None:
        """Wait until the work before the mark is done."""

    def elapsed_time(self, end_event: Any) -> float:
        """ms from this mark to a later one; both are `timed`, and done."""


class CopyStream(Protocol):
    """Where copies run in the order in which they come, beside the computation."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        """Have `copies`, which read or write `staged`, run when the computation so far has."""

    def join(self) -> None:
        """Let what is computed from here on see what they did."""


class Recorder(Protocol):
    """Captures what a function launches, to launch it again at once."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What does again what `compute` does, over the tensors that it used. It may be called several times
        meanwhile, and raises what goes wrong."""


class Meter(Protocol):
    """The most memory in use at once."""

    def reset(self) -> None:
        """Forget the peak so far."""

    def peak(self) -> int:
        """Bytes that were in use at once since `reset`, beyond those in use then."""


class Device(Protocol):
    """One device of this process. Making it touches nothing: `problem` is asked first."""

    kind: str
    """What a user types, before ":N"; names the entry point."""

    name: str
    """`kind`, or "kind:N" where a number was given."""

    torch_device: torch.device

    is_async: bool
    """Whether what is launched runs behind the program: steps are then launched ahead and awaited."""

    has_own_memory: bool
    """Whether it has memory beside the host's, which is measured and divided up when an engine starts."""

    pins_memory: bool
    """Whether what is swapped to the host goes to pinned memory."""

    attention: tuple[str, ...]
    """The backends that attention "auto" tries, in this order, before torch's, which serves everywhere."""

    invariant_attention: str
    """The backend of attention whose bits can be independent of the batch."""

    embedded_dtype: str
    """What dtype "auto" is for the embedded checkpoint, a name; of all others it is bfloat16."""

    @classmethod
    def is_available(cls) -> bool:
        """Whether device "auto" takes this kind, without starting it."""

    @classmethod
    def count(cls) -> int:
        """How many of this kind torch sees."""

    @classmethod
    def problem(cls, index: int | None) -> str | None:
        """One sentence, with what to do; None where number `index` of this kind can be used."""

    @classmethod
    def describe(cls) -> list[str]:
        """A line for each one that can be used: name and memory."""

    def __init__(self, index: int | None = None) -> None: ...

    def of_rank(self, rank: int, size: int) -> "Device":
        """Where rank `rank` of `size` computes, of a model that is cut. Raises ConfigError."""

    def current(self) -> AbstractContextManager[object]:
        """In it, this is the device on which kernels that are not torch's are launched by this thread."""

    def set_current(self) -> None:
        """As `current`, for this thread from now on."""

    def answers(self) -> bool:
        """Whether it still computes, to be asked after an error: False, and the process must start again."""

    def compute_capability(self) -> tuple[int, int] | None:
        """As NVIDIA counts, of the GPU, for which kernels are chosen by it; None where it is none."""

    def num_processors(self) -> int:
        """How many thread blocks it runs at once; 0 where it knows of none."""

    def event(self, *, timed: bool = False) -> Event:
        """A new one, not recorded."""

    def recorder(self) -> Recorder | None:
        """What captures here; None: nothing can."""

    def is_capturing(self) -> bool:
        """Whether what is launched now is captured, and not run."""

    def copy_stream(self) -> CopyStream:
        """A new one."""

    def memory(self) -> tuple[int, int]:
        """Bytes that can be had, and that there are; of the host's where it has none of its own."""

    def release_unused(self) -> None:
        """Give back what torch's allocator keeps and nobody uses."""

    def meter(self) -> Meter | None:
        """Of its own memory; None where it has none."""

    def process_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """What ranks exchange tensors by, a backend of torch.distributed; all of them ask at the same time.
        Raises RuntimeError, AttributeError or ValueError where they cannot meet."""

    def abort_group(self, group: Any) -> None:
        """Let nothing that was launched wait any more for a rank that is gone."""
