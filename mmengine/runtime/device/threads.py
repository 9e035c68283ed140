"""Chooses how many threads compute on a CPU.

The default is the number of physical cores that this process may use, limited by the cgroup's quota. A small
model uses one thread, because several threads would mostly wait for each other. The setting `num_threads`
overrides the default, and so does OMP_NUM_THREADS if `num_threads` is 0.
"""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mmengine.runtime.device.cgroups import ROOT, least_of, number

SMALL_HIDDEN_SIZE = 512  # a layer with a smaller hidden size is faster than the wake-up of a second thread


@dataclass(frozen=True, slots=True)
class Threads:
    """A number of threads or cores, and the reason for the number."""

    count: int
    why: str


def choose_threads(
    setting: int = 0,
    hidden_size: int = 0,
    environment: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    ranks: int = 1,
) -> Threads:
    """Return the thread count and its reason.

    `setting`: the setting `num_threads`, 0 for automatic. `hidden_size`: the model's hidden size, 0 if
    unknown. `ranks`: number of processes that share the machine's cores.
    """
    if setting:
        return Threads(setting, "num_threads")
    if ranks > 1:
        whole = choose_threads(0, hidden_size, environment, root)
        return Threads(max(1, whole.count // ranks), f"{whole.why}, shared by {ranks} ranks")
    asked = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdigit() and int(asked):
        return Threads(int(asked), "OMP_NUM_THREADS")
    if 0 < hidden_size < SMALL_HIDDEN_SIZE:
        return Threads(1, f"a hidden size below {SMALL_HIDDEN_SIZE}")
    return usable_cores(root)


def usable_cores(root: Path = ROOT) -> Threads:
    """Return the number of physical cores that this process may use (at least 1), and its reason.

    `root`: the folder that contains proc and sys.
    """
    allowed = _affinity()
    cores = len({_siblings(cpu, root) for cpu in allowed})
    quota = _quota(root)
    if quota < cores:
        return Threads(max(1, math.floor(quota)), f"the cgroup's quota of {quota:g} cores")
    return Threads(cores, f"physical cores of {len(allowed)} usable CPUs")


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):  # Linux
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _siblings(cpu: int, root: Path) -> str:
    """Return a name for the physical core of `cpu`, a logical CPU.

    If the system does not report cores, each CPU counts as a core.
    """
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return str(cpu)


def _quota(root: Path) -> float:
    """Return the number of cores that the cgroup and its ancestors allow, or infinity."""
    return least_of("cpu", _read_v2, _read_v1, root)


def _read_v2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _read_v1(folder: Path) -> float:
    quota = number(folder / "cpu.cfs_quota_us")
    return quota / number(folder / "cpu.cfs_period_us") if quota > 0 else math.inf
