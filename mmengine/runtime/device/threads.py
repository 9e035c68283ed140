"""How many threads compute.

As many as there are physical cores for this process: what its affinity allows, siblings of a core counted
once, and no more than its cgroup may use. A small model computes on one, because its threads would mostly
wait for one another. The setting `num_threads`, and without it OMP_NUM_THREADS, say otherwise.
"""

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mmengine.runtime.device.cgroups import ROOT, least_of, number

SMALL_HIDDEN_SIZE = 512  # below it, a layer takes less time than it takes to wake a second thread


@dataclass(frozen=True, slots=True)
class Threads:
    count: int
    why: str


def choose_threads(
    setting: int = 0,
    hidden_size: int = 0,
    environment: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    ranks: int = 1,
) -> Threads:
    """`setting`: that of the config, 0 for auto. `hidden_size`: the model's, 0 when none is known. `ranks`:
    processes that share the machine's cores."""
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
    """Physical cores that this process may compute on, at least one. `root`: where /proc and /sys are."""
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
    """What names the physical core of a CPU; where the system does not say, each CPU is one."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    with suppress(OSError):
        return path.read_text(encoding="ascii").strip()
    return str(cpu)


def _quota(root: Path) -> float:
    """Cores that the process's cgroup, and those above it, may use together; infinite without a limit."""
    return least_of("cpu", _read_v2, _read_v1, root)


def _read_v2(folder: Path) -> float:
    quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    return math.inf if quota == "max" else int(quota) / int(period)


def _read_v1(folder: Path) -> float:
    quota = number(folder / "cpu.cfs_quota_us")
    return quota / number(folder / "cpu.cfs_period_us") if quota > 0 else math.inf
