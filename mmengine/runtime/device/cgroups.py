"""Reads the resource limits for this process's cgroup and its ancestors, in cgroups version 1 and 2."""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
Read = Callable[[Path], float]  # maps a group's folder to its limit; infinite without a limit


def least_of(controller: str, read_v2: Read, read_v1: Read, root: Path = ROOT) -> float:
    """Return the smallest limit for `controller` among this process's groups; infinite without a limit.

    `read_v2` and `read_v1` read one group's limit. A missing or unreadable file means no limit. `root`: the
    folder that contains proc and sys.
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
    """Return the folders for a group and its ancestors up to `mount`. A container may not see them all."""
    parts = [part for part in name.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def number(path: Path) -> int:
    """Return the integer that a file contains. Raises OSError or ValueError."""
    return int(path.read_text(encoding="ascii"))
