"""A block store in a local or shared folder, with a file per key.

A value is written to a temporary file, synced and renamed, so a file with a key's name is always whole. When
the folder exceeds its limit, the values that were not read or written for longest are deleted. Several
processes may use the folder at once; each may miss values that another deletes. A process scans the folder
again after writing as much as a cleanup frees. Until then the process does not see other processes' files, so
the folder may exceed its limit by that much per process.
"""

import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from mmengine.block_store.base import MAX_KEY_BYTES
from mmengine.errors import ConfigError

KEPT_SHARE = 0.9  # share of the limit that a cleanup keeps
STALE_S = 3600  # age at which an unfinished value counts as abandoned
ASIDE = ".part"


class FolderStore:
    """A folder with values. `path`: created if missing. `max_bytes`: limit for all values. Raises
    ConfigError.
    """

    def __init__(self, path: str, max_bytes: int):
        self._root, self._max_bytes = Path(path), max_bytes
        self._lock = threading.Lock()
        self._room = 0  # bytes to write before the next scan of the folder
        try:
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"block_store_path {path} cannot be used: {error.strerror}; name a writable folder"
            ) from None

    def _path(self, key: bytes) -> Path:
        if not 2 <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has 2 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        name = key.hex()
        return self._root / name[-2:] / name  # the last digits of a key are uniformly distributed

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [os.path.exists(self._path(key)) for key in keys]

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[memoryview]]) -> None:
        for key, pieces in zip(keys, values, strict=True):
            with suppress(OSError):  # the folder is full or gone: the value is not stored
                self._put(self._path(key), pieces)

    def _put(self, path: Path, pieces: Sequence[memoryview]) -> None:
        size = sum(piece.nbytes for piece in pieces)
        if size > self._max_bytes or (path.exists() and path.stat().st_size == size):
            return
        path.parent.mkdir(exist_ok=True, mode=0o700)
        aside = path.with_name(f"{secrets.token_hex(8)}{ASIDE}")
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file.fileno(), piece)
                os.fsync(file.fileno())
            os.replace(aside, path)
        except BaseException:
            with suppress(OSError):
                aside.unlink()
            raise
        self._grew(size)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return [self._get(self._path(key), buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def _get(self, path: Path, buffer: memoryview) -> bool:
        try:
            # Do not follow links and do not block: other users may put anything into the folder.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size != buffer.nbytes:
                return False
            done = 0
            while done < buffer.nbytes:
                count = os.readv(fd, [buffer[done:]])
                if not count:
                    return False
                done += count
            os.utime(fd)  # marks the value as just used
        except OSError:
            return False
        finally:
            os.close(fd)
        return True

    def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with suppress(OSError):
                self._path(key).unlink()

    def _grew(self, size: int) -> None:
        """Delete the longest unused values if the folder exceeds its limit."""
        with self._lock:
            self._room -= size
            if self._room >= 0:
                return
            files = sorted(self._files())
            held, kept = sum(size for _, size, _ in files), int(self._max_bytes * KEPT_SHARE)
            if held > self._max_bytes:
                for _, size, path in files:
                    if held <= kept:
                        break
                    with suppress(OSError):
                        os.unlink(path)
                    held -= size
            self._room = self._max_bytes - max(held, kept)

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """Yield each value's last use (ns), size and name, and delete abandoned values."""
        newest = 0
        aside: list[tuple[int, str]] = []
        for folder in _entries(self._root):
            for entry in _entries(Path(folder.path)) if folder.is_dir(follow_symlinks=False) else ():
                with suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    newest = max(newest, status.st_mtime_ns)
                    if entry.name.endswith(ASIDE):
                        aside.append((status.st_mtime_ns, entry.path))
                    else:
                        yield status.st_mtime_ns, status.st_size, entry.path
        for since, path in aside:
            if newest - since > STALE_S * 10**9:
                with suppress(OSError):
                    os.unlink(path)

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _write_all(fd: int, piece: memoryview) -> None:
    done = 0
    while done < piece.nbytes:
        done += os.write(fd, piece[done:])
