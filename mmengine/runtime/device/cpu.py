"""The CPU as a Device. Each call completes its work before it returns."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmengine.runtime.device.cgroups import ROOT, least_of, number
from mmengine.runtime.device.port import CopyStream, Device, Event, Meter, Recorder

_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


class InlineCopies:
    """A CopyStream that copies immediately."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        copies()

    def join(self) -> None:
        """Return immediately, because no copy runs in the background."""


class DoneEvent:
    """An Event on a device that has already finished all work when the event is recorded."""

    def record(self) -> None:
        """Do nothing, because all work is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return immediately, because all work is done."""

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class CpuDevice:
    """Implements Device for the host's CPU."""

    kind = "cpu"
    is_async = has_own_memory = pins_memory = False
    attention: tuple[str, ...] = ("native",)
    invariant_attention = "native"
    embedded_dtype = "float32"

    @classmethod
    def is_available(cls) -> bool:
        return True

    @classmethod
    def count(cls) -> int:
        return 1

    @classmethod
    def problem(cls, index: int | None) -> str | None:
        return None

    @classmethod
    def describe(cls) -> list[str]:
        return []

    def __init__(self, index: int | None = None) -> None:
        self.name = self.kind if index is None else f"{self.kind}:{index}"
        self.torch_device = torch.device("cpu") if index is None else torch.device("cpu", index)

    def of_rank(self, rank: int, size: int) -> Device:
        """Return this device, because all ranks share the cores."""
        return self

    def current(self) -> AbstractContextManager[object]:
        return _NO_CONTEXT

    def set_current(self) -> None:
        """Do nothing, because there is only one CPU device."""

    def answers(self) -> bool:
        return True

    def compute_capability(self) -> tuple[int, int] | None:
        return None

    def num_processors(self) -> int:
        return 0

    def event(self, *, timed: bool = False) -> Event:
        return DoneEvent()

    def recorder(self) -> Recorder | None:
        return None

    def is_capturing(self) -> bool:
        return False

    def copy_stream(self) -> CopyStream:
        return InlineCopies()

    def memory(self) -> tuple[int, int]:
        available = available_memory()
        return available, available

    def release_unused(self) -> None:
        """Do nothing, because torch does not cache unused host memory."""

    def meter(self) -> Meter | None:
        return None

    def process_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """Return a gloo group that connects processes on this machine."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch has no public name
        options._timeout = timeout
        # Only this machine may connect. By default gloo would listen on the address of the host name.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def abort_group(self, group: Any) -> None:
        """Do nothing: gloo's calls wait on the host and end with their timeout."""


def available_memory(root: Path = ROOT) -> int:
    """Return how many bytes can be allocated without swapping, limited by this process's cgroup.

    If the system does not report its memory, 2 GiB are assumed. `root`: the folder that contains proc and
    sys.
    """
    try:
        with (root / "proc/meminfo").open(encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = 2 * 2**30
    return int(max(0, min(available, least_of("memory", _available_v2, _available_v1, root))))


def _available_v2(folder: Path) -> float:
    if (folder / "memory.max").read_text(encoding="ascii").strip() == "max":
        return math.inf
    used = number(folder / "memory.current") - _cached(folder, "inactive_file")
    return number(folder / "memory.max") - used


def _available_v1(folder: Path) -> float:
    used = number(folder / "memory.usage_in_bytes") - _cached(folder, "total_inactive_file")
    return number(folder / "memory.limit_in_bytes") - used


def _cached(folder: Path, name: str) -> int:
    """Return the field `name` in memory.stat: the bytes of a cgroup's file cache that the kernel can free."""
    lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    return int(dict(line.split() for line in lines)[name])
