"""Read the limits of a process's cgroup and its ancestors: version 2, and version 1 by controller."""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
Read = Callable[[Path], float]  # maps a group's folder to its limit; infinite without a limit


def least_of(controller: str, read_v2: Read, read_v1: Read, root: Path = ROOT) -> float:
    """Return the smallest limit among the groups. `root`: the folder that holds /proc and /sys.

    A missing or unreadable file means no limit.
    """
    least, mount = math.inf, root / "sys/fs/cgroup"
    with suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, name = line.split(":", 2)
            if not controllers:
                folders, read = _upwards(mount, name), read_v2
            elif controller in controllers.split(","):
                folders, read = _upwards(mount / controller, name), read_v1
            else:
                continue
            for folder in folders:
                with suppress(OSError, ValueError, KeyError):
                    least = min(least, read(folder))
    return least


def _upwards(mount: Path, name: str) -> list[Path]:
    """Return the folders for a group and its ancestors, as far as they are mounted on this machine."""
    parts = [part for part in name.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def number(path: Path) -> int:
    """Return the number in a file. Raises OSError or ValueError."""
    return int(path.read_text(encoding="ascii"))
