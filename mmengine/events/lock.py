"""One writer a log: a lock on its folder, held as long as the descriptor is open.

POSIX systems have flock. Windows has msvcrt.locking, over the first byte of the same file. Both end with the
process, however it ends. They differ where somebody only asks: who asks flock shares the lock with others who
ask, while a lock on Windows has one holder, so there asking is tried again before the log counts as written.
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
    msvcrt = import_module("msvcrt")  # type checkers on other systems know of none
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


_TRIES, _AGAIN_S = 5, 0.02  # a reader that asks holds the lock for some microseconds


def lock(folder: Path) -> int:
    """The descriptor that holds the lock. Raises LogError when another process has it, OSError when
    the file cannot be opened."""
    fd = open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
    for _ in range(_TRIES):
        with suppress(OSError):
            _take(fd)
            return fd
        time.sleep(_AGAIN_S)
    os.close(fd)
    raise LogError(f"another process writes the log in {folder}; name another folder")


def why_not_held(folder: Path) -> str:
    """Why a lock in this folder, which two take here at once, says nothing; "" where it holds. What another
    machine sees of it cannot be seen here. Raises OSError when the folder cannot be written."""
    path = folder / f"lock-{os.getpid()}-{time.monotonic_ns()}"  # nobody else's
    first = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        second = open_file(path, os.O_RDWR)
        try:
            try:
                _take(first)
            except OSError as error:
                return f"the file system of {folder} locks no files ({error.strerror})"
            with suppress(OSError):
                _take(second)
                return f"two could lock one file in {folder} at once"
            return ""
        finally:
            os.close(second)
    finally:
        os.close(first)
        path.unlink()


def is_locked(folder: Path) -> bool:
    """Whether a writer is at work there. Changes nothing in the folder."""
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
