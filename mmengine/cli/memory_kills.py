"""Finds out whether the kernel's out-of-memory killer ended a process.

SIGKILL does not reveal its sender, but the kernel counts out-of-memory kills per cgroup. A supervisor shares
the cgroup of its child, so it reads this count before the child starts and after the child ends.
"""

from pathlib import Path

CGROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def num_memory_kills() -> int | None:
    """Return how many out-of-memory kills this process's cgroup has had, or None if unknown."""
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
    """Return `oom_kill` from the first file with this line. A container sees its cgroup at the root of the
    cgroup file system, so several files are tried.
    """
    for file in files:
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def how_killed(before: int | None, after: int | None, peak_bytes: int) -> str:
    """Describe the end of a process that SIGKILL ended.

    `before`, `after`: results of `num_memory_kills`. `peak_bytes`: the process's peak memory.
    """
    if before is None or after is None:
        who = "probably by the kernel, for memory"
    elif after > before:
        who = "by the kernel, for memory"
    else:
        who = "but not for memory (the kernel counted no out-of-memory kill)"
    return f"the process was killed (SIGKILL), {who}; its peak memory was {peak_bytes / 2**30:.2f} GiB"
