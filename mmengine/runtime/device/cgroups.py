"""What a process's cgroup, and those above it, may use: of version 2, and of version 1 by controller."""

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
Read = Callable[[Path], float]  # of a group's folder; infinite where it has no limit


def least_of(controller: str, read_v2: Read, read_v1: Read, root: Path = ROOT) -> float:
    """The least that any of the groups has. `root`: where /proc and /sys are. A file that is not there, or
    says something else, is no limit."""
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
    """The folder of a group and those above it, as far as they are mounted here."""
    parts = [part for part in name.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def number(path: Path) -> int:
    """Raises OSError, ValueError."""
    return int(path.read_text(encoding="ascii"))
