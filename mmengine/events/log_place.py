"""Notices that a log's folder was removed, renamed, replaced or unmounted while the log is being written.

The writer can then still write to its open files, but no other process can find the records.
"""

import os
import time
from pathlib import Path

LOOK_S = 0.5  # minimum time between two checks, in seconds


class LogPlace:
    """Checks that the log's file names still refer to the files that the writer has open.

    `lock`, `fd`: path and descriptor of the lock file.
    """

    def __init__(self, lock: Path, fd: int):
        self._lock = self._segment = lock, os.fstat(fd)
        self._lost, self._look_at = "", 0.0

    def watch(self, segment: Path, fd: int) -> None:
        """Watch the segment that will be written from now on."""
        self._segment = segment, os.fstat(fd)

    def lost(self) -> str:
        """Return why new records would be lost, or "". Checks at most every LOOK_S seconds. Thread-safe."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._lost = _missing(*self._lock) or _missing(*self._segment)
        return self._lost


def _missing(path: Path, opened: os.stat_result) -> str:
    try:
        if os.path.samestat(os.stat(path), opened):
            return ""
        why = f"{path.name} is another file"
    except OSError as error:
        why = f"{path.name}: {error.strerror}"
    what = f"the folder {path.parent} of the log was removed, moved or unmounted ({why})"
    return f"{what}; put it back, or start again with another folder"
