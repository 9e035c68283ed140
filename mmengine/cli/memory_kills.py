"""Whether the kernel killed a process for memory, and how that is told.

SIGKILL says nothing of who sent it. The kernel counts the processes of a cgroup that it killed for memory,
whichever limit was reached; a supervisor is in the cgroup of its child, so it asks that count before and
after.
"""

from pathlib import Path

CGROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def num_memory_kills() -> int | None:
    """Processes of this one's cgroup that the kernel killed for memory so far; None where it does not say."""
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
    """The `oom_kill` of the first that has one: inside of a container its own cgroup is the mounted one."""
    for file in files:
        try:
            counts = dict(line.split() for line in file.read_text().splitlines())
            return int(counts["oom_kill"])
        except (OSError, ValueError, KeyError):
            continue
    return None


def how_killed(before: int | None, after: int | None, peak_bytes: int) -> str:
    """What is known of a process that died of SIGKILL: `before` and `after` of `num_memory_kills`."""
    if before is None or after is None:
        who = "probably by the kernel, for memory"
    elif after > before:
        who = "by the kernel, for memory"
    else:
        who = "not by the kernel for memory, as its count of such kills did not rise"
    return f"the process was killed (SIGKILL), {who}; it held {peak_bytes / 2**30:.2f} GiB at most"
