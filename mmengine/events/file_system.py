"""What a log asks of files, on each system: no link is followed, bytes stay bytes, and what was forced to the
disk is there after a crash of the system.

Linux has all of it. macOS has no fdatasync and no posix_fallocate: fsync and zeros take their place. Windows
has neither these nor O_NOFOLLOW and statvfs, and opens no folder: there a link is looked for before a file is
opened, and new names reach the disk with the file system's own journal.
"""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

# Bits that are 0 where the system has no such thing: only Windows tells text from bytes.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BYTES = getattr(os, "O_BINARY", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # to open a named pipe that nobody writes, so that it can be refused


def open_file(path: Path, flags: int) -> int:
    """The descriptor of a file that is no link, made with the rights of its owner alone. Raises OSError."""
    if not _NO_LINK and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | _NO_LINK | _BYTES, 0o600)


def write_whole(path: Path, data: bytes | bytearray) -> None:
    """A file with these bytes, which takes the place of one that is there: whole, or not at all. Its name is
    forced to the disk too. Raises OSError; then nothing is left beside it."""
    part = path.with_name(path.name + ".part")
    try:
        with open(open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)  # all of it, however often the system must be asked
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    sync_folder(path.parent)


def sync_data(fd: int) -> None:
    """Force a file's bytes, and the size that reading them needs, to the disk. Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk. Raises OSError."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Room on the folder's disk for who is no superuser. Raises OSError."""
    if not hasattr(os, "statvfs"):
        return shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def allocate(fd: int, num_bytes: int) -> None:
    """Take the disk's room for an open file's first bytes. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    missing = num_bytes - os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_END)
    if missing > 0 and os.write(fd, bytes(missing)) != missing:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
