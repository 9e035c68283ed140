"""Finds out whether the kernel killed a process for memory.

SIGKILL does not name its sender. The kernel counts the out-of-memory kills in each cgroup, for any limit. A
supervisor shares its child's cgroup, so it reads this count before and after.
"""

from pathlib import Path

CGROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def num_memory_kills() -> int | None:
    """Return the number of out-of-memory kills in this process's cgroup so far; None if unknown."""
    try:
        lines = CGROUPS.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            places = [MOUNT / "memory" / path.strip("/"), MOUNT / "memory"]
            found = _count([place / "memory.oom_control" for place in places])
        elif not controllers:
            found = _count([MOUNT / path.strip("/") / "memory.events", MOUNT / "memory.events"])
        else:
            continue
        if found is not None:
            return found
    return None


def _count(files: list[Path]) -> int | None:
    """Return `oom_kill` from the first file that has it: a container's own cgroup is mounted at the top."""
    for file in files:
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def how_killed(before: int | None, after: int | None, peak_bytes: int) -> str:
    """Describe a process that died from SIGKILL. `before` and `after` are results of `num_memory_kills`."""
    if before is None or after is None:
        who = "probably by the kernel, for memory"
    elif after > before:
        who = "by the kernel, for memory"
    else:
        who = "not by the kernel for memory (its count of such kills did not rise)"
    return f"the process was killed (SIGKILL), {who}; its peak memory was {peak_bytes / 2**30:.2f} GiB"
