"""The file operations that a log needs, for each operating system. Opening a link fails, and synced bytes
survive a system crash.

Linux has all the calls. macOS lacks fdatasync and posix_fallocate; fsync and written zeros replace them.
Windows also lacks O_NOFOLLOW and statvfs, and cannot open folders. On Windows, `open_file` first checks
whether the path is a link, and new file names are not synced.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# A flag is 0 on systems without the flag. O_BINARY exists only on Windows.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BYTES = getattr(os, "O_BINARY", 0)
# With O_NONBLOCK, opening a named pipe does not wait for a writer.
NO_WAIT = getattr(os, "O_NONBLOCK", 0)


def open_file(path: Path, flags: int) -> int:
    """Open a file and return its descriptor. Only the owner may read or write a new file. Raises OSError,
    also if the path is a link.
    """
    if not _NO_LINK and path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return os.open(path, flags | _NO_LINK | _BYTES, 0o600)


def write_whole(path: Path, data: bytes | bytearray) -> None:
    """Write `data` to a new file, rename the file to `path`, and sync both to the disk. An existing file is
    replaced completely or not at all. Raises OSError, and then leaves no partial file.
    """
    with (
        replacing(path) as part,
        open(open_file(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file,
    ):
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path for a new file. When the block ends, rename the new file to `path`. After an error,
    delete the new file.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def sync_data(fd: int) -> None:
    """Sync a file's contents and size to the disk. Raises OSError."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def sync_folder(folder: Path) -> None:
    """Sync the file names in a folder to the disk. Raises OSError."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(folder: Path) -> int:
    """Return how many bytes an ordinary user may still write in the folder. Raises OSError."""
    if not hasattr(os, "statvfs"):
        return shutil.disk_usage(folder).free
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def allocate(fd: int, num_bytes: int) -> None:
    """Allocate disk space for the first `num_bytes` bytes in an open file. Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    missing = num_bytes - os.fstat(fd).st_size
    os.lseek(fd, 0, os.SEEK_END)
    if missing > 0 and os.write(fd, bytes(missing)) != missing:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
