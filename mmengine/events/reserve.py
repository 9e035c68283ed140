"""Disk space in reserve: on a full disk, running requests can still be written to their end."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from mmengine.events.file_system import allocate, free_bytes, open_file

RESERVE_BYTES = 4 * 2**20
MIN_BYTES = 64 * 2**10
FULL = (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """A file with allocated, unwritten blocks beside the segments. `is_held` is False after the reserve was
    given up, or if the disk had no space for it.

    A file system that copies on write may not return the space at once. Then the log stalls a little earlier,
    and loses nothing.
    """

    def __init__(self, folder: Path, num_bytes: int = RESERVE_BYTES):
        self._folder, self._path = folder, folder / "reserve"
        self._num_bytes = num_bytes
        while not (held := self._hold(4)) and self._num_bytes > MIN_BYTES:
            self._num_bytes //= 4  # a small disk gets a small reserve
        self.is_held = held

    def take_back(self) -> bool:
        """Take the reserve again once twice its size is free, so that a full disk does not become full again
        at once. Returns False otherwise.
        """
        self.is_held = self._hold(2)
        return self.is_held

    def release(self) -> None:
        """Give the space to the log, or back to the disk."""
        self.is_held = False
        with suppress(OSError):
            self._path.unlink()

    def _hold(self, times: int) -> bool:
        """Take the reserve from a disk with `times` as much free space. Returns False on a full disk. Returns
        True if the file cannot be allocated for another reason, since that says nothing about the space.
        """
        try:
            if free_bytes(self._folder) < times * self._num_bytes:
                return False
            fd = open_file(self._path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            return error.errno not in FULL
        try:
            allocate(fd, self._num_bytes)
            return True
        except OSError as error:
            with suppress(OSError):
                self._path.unlink()
            return error.errno not in FULL
        finally:
            os.close(fd)
