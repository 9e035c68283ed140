"""Folders whose files become code or weights, opened so that nobody but their owner can have put them there.

What OpenSSH calls strict modes, for every folder from the root down: it belongs to root or to this user and
nobody else can write to it, but for sticky folders (/tmp), where what lies in them can be moved by its owner
alone.
"""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

MAX_LINKS = 40  # symbolic links on the way, as Linux follows them
_OPEN = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class BadModes(Exception):
    """Somebody else could change what lies in a folder. The text says which one, and how to mend that."""


def open_strict(path: Path, *, make: bool = False) -> int:
    """A descriptor (O_PATH) of a folder, for `dir_fd`; the caller closes it. `make`: folders that are missing
    are made, for their owner alone. Raises BadModes, and OSError."""
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
    """`fd`, `here`: the folder that was reached."""

    def __init__(self, fd: int):
        self.fd, self.here = fd, Path("/")
        self._num_links = 0

    def enter(self, name: str, make: bool) -> str | None:
        """Go one folder on. Gives where a symbolic link leads that stands there instead; the walk is then
        where that begins."""
        self.check(is_last=False)
        try:
            found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            if not make:
                raise
            with suppress(FileExistsError):  # another process was faster
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
        """Of a sticky folder that is passed through, `enter` looks at the entry."""
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
    """The names of a path, the first one last."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _of_another(path: Path) -> BadModes:
    return BadModes(f"{path} belongs to another user, who can put files there")
