"""A block store in a local or shared folder, with one file per key.

A value is written to a temporary file, and the file is synced and renamed. A file with a key as its name is
therefore always complete. When the folder exceeds its limit, the least recently used values are deleted.
Several processes may use the folder at once, and each process may delete any value.

A process scans the folder at the latest when its new values exceed a tenth of `max_bytes`. Between scans, the
process counts only its own files. Each process can therefore make the folder exceed its limit by about a
tenth.
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

KEPT_SHARE = 0.9  # a cleanup shrinks the folder to this share of the size limit
STALE_S = 3600  # seconds after which an unfinished temporary file counts as abandoned
ASIDE = ".part"  # suffix for temporary files


class FolderStore:
    """A store in the folder `path`, which is created if it is missing. `max_bytes`: maximum total size in
    bytes. Raises ConfigError if the folder cannot be created.
    """

    def __init__(self, path: str, max_bytes: int):
        self._root, self._max_bytes = Path(path), max_bytes
        self._lock = threading.Lock()
        self._room = 0  # bytes that may be written before the next scan of the folder
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
        # a key's last digits are uniformly distributed, so all subfolders have about equal sizes
        return self._root / name[-2:] / name

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [os.path.exists(self._path(key)) for key in keys]

    def put(self, keys: Sequence[bytes], values: Sequence[Sequence[memoryview]]) -> None:
        for key, pieces in zip(keys, values, strict=True):
            with suppress(OSError):  # the disk is full, or the folder was removed
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
            # Other users may put links or named pipes into a shared folder.
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
            os.utime(fd)  # the modification time records the last use
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
        """Count `size` new bytes. If a scan is due, scan the folder and enforce the size limit."""
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
        """Yield each value's time of last use (ns), size in bytes, and path. Delete abandoned temporary
        files.
        """
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
        """Do nothing, because the store keeps no file open."""


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
