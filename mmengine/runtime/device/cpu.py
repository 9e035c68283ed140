"""The CPU as a device: what is asked for is done when the call returns."""

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
    """A CopyStream whose copies are done where they come."""

    def run(self, copies: Callable[[], None], staged: Tensor) -> None:
        copies()

    def join(self) -> None:
        """Nothing runs beside."""


class DoneEvent:
    """An Event of a device on which all work is done when it was asked for."""

    def record(self) -> None:
        """There is nothing to wait for."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class CpuDevice:
    """See Device."""

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
        """All ranks share the cores."""
        return self

    def current(self) -> AbstractContextManager[object]:
        return _NO_CONTEXT

    def set_current(self) -> None:
        """There is one."""

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
        """torch keeps nothing of the host's memory."""

    def meter(self) -> Meter | None:
        return None

    def process_group(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        """gloo, between processes of this machine."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # theirs: Options
        options._timeout = timeout
        # Nobody but this machine may connect; by default it is the address of the host's name.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return dist.ProcessGroupGloo(store, rank, size, options)

    def abort_group(self, group: Any) -> None:
        """A call waits on the host, and ends with its timeout."""


def available_memory(root: Path = ROOT) -> int:
    """Bytes of the host that can be had without swapping, no more than this process's cgroup leaves; half of
    4 GiB where the system does not say. `root`: where /proc and /sys are."""
    try:
        with (root / "proc/meminfo").open(encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        available = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        available = 2 * 2**30
    return int(max(0, min(available, least_of("memory", _left_v2, _left_v1, root))))


def _left_v2(folder: Path) -> float:
    if (folder / "memory.max").read_text(encoding="ascii").strip() == "max":
        return math.inf
    used = number(folder / "memory.current") - _cached(folder, "inactive_file")
    return number(folder / "memory.max") - used


def _left_v1(folder: Path) -> float:
    used = number(folder / "memory.usage_in_bytes") - _cached(folder, "total_inactive_file")
    return number(folder / "memory.limit_in_bytes") - used


def _cached(folder: Path, name: str) -> int:
    """Bytes of files that are held for a group and go when it needs the room."""
    lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    return int(dict(line.split() for line in lines)[name])
