"""File operations of a log on each operating system: no link is followed, and forced bytes survive a system
crash.

Linux has all the calls. macOS lacks fdatasync and posix_fallocate: fsync and zeros replace them. Windows also
lacks O_NOFOLLOW and statvfs and cannot open folders. There a link is checked before a file is opened, and the
file system's journal forces new names to the disk.
"""

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

# Flags are 0 on systems without them; only Windows distinguishes text files from binary files.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BYTES = getattr(os, "O_BINARY", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0)  # lets a named pipe without a writer be opened, and then refused


def open_file(path: Path, flags: int) -> int:
    """Open a file that is no link and return its descriptor. A new file has rights for its owner alone.
    Raises OSError.
    """
    if not _NO_LINK and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | _NO_LINK | _BYTES, 0o600)


def write_whole(path: Path, data: bytes | bytearray) -> None:
    """Write a file with these bytes, replacing an existing one completely or not at all, and force its name
    to the disk. Raises OSError without leaving a partial file.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(data)  # retries until all bytes are written
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
    """Force a folder's names to the disk. Raises OSError."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Return the disk space in bytes that an ordinary user has in the folder. Raises OSError."""
    if not hasattr(os, "statvfs"):
        return shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def allocate(fd: int, num_bytes: int) -> None:
    """Allocate disk space for an open file's first bytes. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    missing = num_bytes - os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_END)
    if missing > 0 and os.write(fd, bytes(missing)) != missing:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
