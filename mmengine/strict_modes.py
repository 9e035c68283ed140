"""Opens folders that contain code or weights, and refuses folders that another user could have changed.

The rule is OpenSSH's "strict modes", applied to every folder from the root down: a folder belongs to root or
to the process's user, and no other user can write to the folder. Sticky folders such as /tmp are allowed
above the opened folder. Inside a sticky folder, other users cannot move or delete the next folder on the
path.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_LINKS = 40  # maximum number of symbolic links in a path, as in Linux
_OPEN = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BadModes(Exception):
    """Raised if another user could change a folder's contents. The message names the folder and the fault."""


def open_strict(path: Path, *, make: bool = False) -> int:
    """Open a folder and return its descriptor (O_PATH), for `dir_fd`. The caller closes the descriptor.

    `make`: create missing folders, with permissions for their owner only. Raises BadModes and OSError.
    """
    walk = _Walk(os.open("/", _OPEN))
    try:
        waiting = _parts(os.path.abspath(path))
        while waiting:
            target = walk.enter(waiting.pop(), make)
            waiting += [] if target is None else _parts(target)
        walk.check(is_last=True)
    except BaseException:
        os.close(walk.fd)
        raise
    return walk.fd


class _Walk:
    """A walk along a path. `fd`, `here`: descriptor and path of the folder reached so far."""

    def __init__(self, fd: int):
        self.fd, self.here = fd, Path("/")
        self._num_links = 0

    def enter(self, name: str, make: bool) -> str | None:
        """Enter the folder `name`. If `name` is a symbolic link, return the link's target instead. If the
        target is absolute, move to the root folder.
        """
        self.check(is_last=False)
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):  # another process created the folder first
                os.mkdir(name, 0o700, dir_fd=self.fd)
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        if found.st_uid not in (0, os.geteuid()):
            raise _of_another(self.here / name)
        if not stat.S_ISLNK(found.st_mode):
            self._open(name)
            return None
        self._num_links += 1
        if self._num_links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(name, dir_fd=self.fd)
        if target.startswith("/"):
            self._open("/")
        return target

    def check(self, *, is_last: bool) -> None:
        """Raise BadModes if another user could change the folder.

        `is_last`: whether the folder is the last on the path. Before the last folder, sticky folders are
        allowed, because the next folder's owner is checked too.
        """
        status = os.fstat(self.fd)
        if status.st_uid not in (0, os.geteuid()):
            raise _of_another(self.here)
        if status.st_mode & _OTHERS_WRITE and (is_last or not status.st_mode & stat.S_ISVTX):
            raise BadModes(f"{self.here} can be written by others: chmod go-w {self.here}")

    def _open(self, name: str) -> None:
        fd = os.open(name, _OPEN, dir_fd=self.fd)
        os.close(self.fd)
        self.fd, self.here = fd, Path(os.path.normpath(self.here / name))


def _parts(path: str) -> list[str]:
    """Return the names in a path in reverse order."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _of_another(path: Path) -> BadModes:
    return BadModes(f"{path} belongs to another user, who can put files there")
