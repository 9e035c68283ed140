"""Room on the disk that is held back: when it is full, what runs can still be written to its end."""

import errno
import os
from contextlib import suppress
from pathlib import Path

from mmengine.events.file_system import allocate, free_bytes, open_file

RESERVE_BYTES = 4 * 2**20
MIN_BYTES = 64 * 2**10
FULL = (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """A file of blocks that were asked for and not written, beside the segments. `is_held` False: it was
    given up, or there was no room for it.

    A file system that copies on write may not give the room back at once; then the log stalls a little
    earlier, and loses nothing either.
    """

    def __init__(self, folder: Path, num_bytes: int = RESERVE_BYTES):
        self._folder, self._path = folder, folder / "reserve"
        self._num_bytes = num_bytes
        while not (held := self._hold(4)) and self._num_bytes > MIN_BYTES:
            self._num_bytes //= 4  # a small disk gets a small reserve
        self.is_held = held

    def take_back(self) -> bool:
        """Hold the room again, once there is twice as much: who is full now should not be full at once
        again. False while there is not."""
        self.is_held = self._hold(2)
        return self.is_held

    def release(self) -> None:
        """Give the room to the log, or back to the disk."""
        self.is_held = False
        with suppress(OSError):
            self._path.unlink()

    def _hold(self, times: int) -> bool:
        """Take the room, from a disk that has `times` as much. False when it is full. True also where
        room cannot be held for another reason: then it would tell nothing."""
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
