"""Reads the resource limits for this process's cgroup and its ancestors, for cgroups version 1 and 2."""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
Read = Callable[[Path], float]  # returns a cgroup's limit from its folder, or infinity


def least_of(controller: str, read_v2: Read, read_v1: Read, root: Path = ROOT) -> float:
    """Return the smallest limit for `controller` among this process's cgroups, or infinity.

    `read_v2`, `read_v1`: functions that read one cgroup's limit. A missing or unreadable file means no
    limit. `root`: the folder that contains proc and sys.
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
    """Return the folders for a cgroup and its ancestors up to `mount`. In a container, some may not exist."""
    parts = [part for part in name.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def number(path: Path) -> int:
    """Return the integer in a file. Raises OSError or ValueError."""
    return int(path.read_text(encoding="ascii"))
