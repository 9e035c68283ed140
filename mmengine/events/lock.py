"""Locks a log's folder, so that only one process writes the log. Closing the file descriptor releases the
lock.

POSIX systems use flock. Windows uses msvcrt.locking on the lock file's first byte. On all systems the lock
ends when the process ends.

`is_locked` takes the lock for a moment. With flock, this lock is shared. Windows has only exclusive locks, so
two calls of `is_locked` can collide. On Windows, `is_locked` therefore tries several times.
"""

import os
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from mmengine.errors import LogError
from mmengine.events.file_system import open_file

try:
    import fcntl

    def _take(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _ask(fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

except ImportError:  # Windows
    msvcrt = import_module("msvcrt")  # type checkers on other systems do not know this module
    ASK_TIMES, ASK_AGAIN_S = 3, 0.005

    def _take(fd: int) -> None:
        os.lseek(fd, 0, os.SEEK_SET)
        msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)

    def _ask(fd: int) -> None:
        for _ in range(ASK_TIMES - 1):
            with suppress(OSError):
                _take(fd)
                return
            time.sleep(ASK_AGAIN_S)
        _take(fd)


_TRIES, _AGAIN_S = 5, 0.02  # several tries, because `is_locked` holds the lock for some microseconds


def lock(folder: Path) -> int:
    """Take the lock and return the file descriptor that holds it. Raises LogError if another process has the
    lock, and OSError if the lock file cannot be opened.
    """
    fd = open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
    for _ in range(_TRIES):
        with suppress(OSError):
            _take(fd)
            return fd
        time.sleep(_AGAIN_S)
    os.close(fd)
    raise LogError(f"another process is writing the log in {folder}; name another folder")


def why_not_held(folder: Path) -> str:
    """Return why locks do not work in this folder, or "" if they work. The check uses only this process, and
    cannot detect locks that fail between machines. Raises OSError if the folder is not writable.
    """
    path = folder / f"lock-{os.getpid()}-{time.monotonic_ns()}"  # a name that no other process uses
    first = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        second = open_file(path, os.O_RDWR)
        try:
            try:
                _take(first)
            except OSError as error:
                return f"the file system of {folder} does not support file locks ({error.strerror})"
            with suppress(OSError):
                _take(second)
                return f"two processes could lock the same file in {folder} at once"
            return ""
        finally:
            os.close(second)
    finally:
        os.close(first)
        path.unlink()


def is_locked(folder: Path) -> bool:
    """Return whether a process is writing the log. Nothing changes in the folder."""
    try:
        fd = open_file(folder / "lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        _ask(fd)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
