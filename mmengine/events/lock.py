"""One writer a log: a lock on its folder, held as long as the descriptor is open."""

import fcntl
import os
import time
from pathlib import Path

from mmengine.errors import LogError

_TRIES, _AGAIN_S = 5, 0.02  # a reader that asks holds the lock for some microseconds


def lock(folder: Path) -> int:
    """The descriptor that holds the lock. Raises LogError when another process has it, OSError when
    the file cannot be opened."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    for _ in range(_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError:
            time.sleep(_AGAIN_S)
    os.close(fd)
    raise LogError(f"another process writes the log in {folder}; name another folder")


def is_locked(folder: Path) -> bool:
    """Whether a writer is at work there. Changes nothing in the folder."""
    try:
        fd = os.open(folder / "lock", os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
