"""Reserves disk space, so that events for running requests can still be written when the disk is full."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from mmengine.events.file_system import allocate, free_bytes, open_file

RESERVE_BYTES = 4 * 2**20
MIN_BYTES = 64 * 2**10
FULL = (errno.ENOSPC, errno.EDQUOT)  # the errors that a full disk causes


class Reserve:
    """A file in the log's folder that occupies disk space. `is_held` is False after `release`, or if the disk
    was too full.

    A copy-on-write file system may free a deleted file's space late. The log may then stall, but loses no
    record.
    """

    def __init__(self, folder: Path, num_bytes: int = RESERVE_BYTES):
        self._folder, self._path = folder, folder / "reserve"
        self._num_bytes = num_bytes
        while not (held := self._hold(4)) and self._num_bytes > MIN_BYTES:
            self._num_bytes //= 4  # a nearly full disk gets a small reserve
        self.is_held = held

    def take_back(self) -> bool:
        """Reserve the space again if twice the reserve's size is free. With less free space, the reserve
        itself would fill the disk again. Returns `is_held`.
        """
        self.is_held = self._hold(2)
        return self.is_held

    def release(self) -> None:
        """Delete the file, so that the log can use its space."""
        self.is_held = False
        with suppress(OSError):
            self._path.unlink()

    def _hold(self, times: int) -> bool:
        """Allocate the file if the free space is at least `times` the reserve's size. Returns False if the
        disk is too full, and True after any other error, because such an error says nothing about the free
        space.
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
